"""The two environment variables that hold a server's URL, and advice where only the wrong one is set.

It must not know what a URL looks like.
"""

import os
from typing import Final

COMMANDS_URL: Final = "TCPSTORE_URL"
"""The server that the commands use."""

SERVER_URL: Final = "TCPSTORE_SERVER_URL"
"""The server that holds all stores of this process, under names."""


def advice_for_stores() -> str:
    """Return advice for the error of a store at an address, if only the commands' variable is set; else ""."""
    if os.environ.get(SERVER_URL) or not os.environ.get(COMMANDS_URL):
        return ""
    return f"({COMMANDS_URL} is for the tcpstore command; to have named stores on that server, set {SERVER_URL})"


def advice_for_commands() -> str:
    """Return advice for the error of a command that was given no address, if the stores' variable is set; else ""."""
    if not os.environ.get(SERVER_URL):
        return ""
    return f"({SERVER_URL} is for stores in programs; to use that server in commands, set {COMMANDS_URL})"
