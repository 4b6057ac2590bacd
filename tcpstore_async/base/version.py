"""The package's version. pyproject.toml reads it from here: looking up the metadata at run time would cost 10 ms."""

from typing import Final

VERSION: Final = "0.2.0"
