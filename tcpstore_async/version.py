"""The package's version, which pyproject.toml reads from here: looking it up at run time costs 10 ms."""

from typing import Final

VERSION: Final = "0.1.0"
