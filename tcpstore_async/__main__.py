"""Entry point of the command `tcpstore`, which is also `python -m tcpstore_async`."""

from .base.interrupts import reset_sigint


def main() -> None:
    """Run the command line."""
    reset_sigint()  # before the imports, which take long enough to be interrupted
    from .cli import main as commands

    commands()


if __name__ == "__main__":
    main()
