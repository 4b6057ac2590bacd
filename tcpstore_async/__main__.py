"""`python -m tcpstore_async`."""

from .cli import main

main()
