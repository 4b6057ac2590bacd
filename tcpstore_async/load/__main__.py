"""One generator, in a process of its own; see `process`."""

from ..server.base import raise_file_limit
from .process import work

if __name__ == "__main__":
    raise_file_limit()
    work()
