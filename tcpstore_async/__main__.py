"""The command `tcpstore`, which is also `python -m tcpstore_async`."""

from .interrupts import end_at_once


def main() -> None:
    """Run a command."""
    end_at_once()  # before the imports, which take long enough to be interrupted
    from .cli import main as commands

    commands()


if __name__ == "__main__":
    main()
