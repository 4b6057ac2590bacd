"""Try an installed package: `python -P tools/try_install.py BUILD`, with `compiled` or `interpreted`.

Run by .github/workflows/release.yml with what is about to be published. `-P` keeps the checkout off the path.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tcpstore_async
from tcpstore_async import TCPStore
from tcpstore_async.serving import build


def main(wanted: str) -> None:
    """Exit with an error unless the installed package is this build, can host a store, and has the page's files."""
    folder = Path(tcpstore_async.__file__).parent
    if folder.parent == Path(__file__).resolve().parent.parent:
        sys.exit(f"{folder} is the checkout, not what was installed")
    if build() != wanted:
        sys.exit(f"the installed package is {build()}, not {wanted}")
    if not (folder / "tools" / "web" / "page" / "index.html").exists() or not (folder / "py.typed").exists():
        sys.exit(f"files are missing in {folder}")
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=60) as store:
        store.set("key", "value")
        if store.get("key") != b"value":
            sys.exit("the store has lost a value")
    command = [str(Path(sys.executable).parent / "tcpstore"), "info", "--local"]
    subprocess.run(command, check=True, timeout=60)


if __name__ == "__main__":
    if sys.argv[1:] not in (["compiled"], ["interpreted"]):
        sys.exit(f"usage: {sys.argv[0]} compiled|interpreted")
    main(sys.argv[1])
