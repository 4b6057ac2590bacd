"""Which PyTorch the tests run with: what it lacks is skipped under `make matrix`. See docs/compatibility.md.

Importing this does not import PyTorch, which takes seconds: most files that need a version start no test with it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

import pytest

try:
    NAME = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    NAME = "(which is not installed)"
    VERSION: tuple[int, ...] = ()
else:
    VERSION = tuple(int(part) for part in NAME.split(".")[:2])


@functools.cache
def methods() -> frozenset[str]:
    """Return the methods of PyTorch's TCPStore. Imports PyTorch."""
    if not VERSION:
        return frozenset()
    import torch.distributed as dist

    return frozenset(dir(dist.TCPStore))


QUIET = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
QUIET += ["-W", "ignore:Implicitly cleaning up:ResourceWarning"]
"""Make warnings errors, except PyTorch's where numpy is not installed and one about a folder that 2.5 leaves."""


_OF_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to .*\n?")


TALKATIVE = (2, 8) <= VERSION <= (2, 10)
"""Whether Gloo prints a line for each group, with any store."""

alone_on_stdout = pytest.mark.skipif(TALKATIVE, reason=f"Gloo of PyTorch {NAME} breaks into the lines of other ranks")


def unsaid(text: str) -> str:
    """Remove Gloo's lines from the output of a program."""
    return _OF_GLOO.sub("", text) if TALKATIVE else text


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip unless PyTorch's TCPStore has these methods; PyTorch is imported when such a test is about to run."""
    wanted = ", ".join(names)
    condition = f"not set({names!r}) <= __import__('versions').methods()"
    return pytest.mark.skipif(condition, reason=f"PyTorch {NAME} lacks one of {wanted}")


def since(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Skip unless PyTorch is new enough to have this."""
    return pytest.mark.skipif((major, minor) > VERSION, reason=f"PyTorch {NAME} has no {what}")


def timeout_message(text: str) -> str:
    """Return a pattern for the text of a timeout of PyTorch's client; 2.4 has only a general one."""
    return text if VERSION >= (2, 5) else "^Socket Timeout$"
