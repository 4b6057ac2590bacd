"""`--port-file`: how a process that listens reports its port to scripts."""

import secrets
from pathlib import Path

import click


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole.

    The temporary file has an unpredictable name and is created exclusively, so no existing file or link is written to.
    """
    temporary = path.with_name(f".tcpstore-{secrets.token_hex(8)}")
    try:
        with open(temporary, "x") as file:
            try:
                file.write(text)
                file.close()
                temporary.replace(path)
            except BaseException:
                temporary.unlink()
                raise
    except OSError as error:
        raise click.ClickException(f"cannot write the port to {path}: {error.strerror}") from None
