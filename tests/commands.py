"""Run commands of `tcpstore` in the process of a test."""

from __future__ import annotations

from click.testing import CliRunner, Result

from support import Server
from tcpstore_async.cli import main


def run_command(server: Server | None, *words: str) -> Result:
    """Run a command, on a server if one is given."""
    url = ["--url", f"tcp://127.0.0.1:{server.port}"] if server is not None else []
    return CliRunner().invoke(main, [*words, *url])
