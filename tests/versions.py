"""Which PyTorch the tests run with: what it lacks is skipped under `make matrix`. See docs/compatibility.md."""

from __future__ import annotations

import re

import pytest

try:
    import torch
    import torch.distributed as dist
except ImportError:
    NAME = "(which is not installed)"
    VERSION: tuple[int, ...] = ()
    METHODS: set[str] = set()
else:
    NAME = torch.__version__
    VERSION = tuple(int(part) for part in NAME.split(".")[:2])
    METHODS = set(dir(dist.TCPStore))

QUIET = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
QUIET += ["-W", "ignore:Implicitly cleaning up:ResourceWarning"]
"""Warnings raise, but for what PyTorch says where numpy is not installed, and of a folder that 2.5 leaves."""


_OF_GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected to .*\n?")


TALKATIVE = (2, 8) <= VERSION <= (2, 10)
"""Whether its Gloo says on standard output of every group, with any store, that it is connected."""

alone_on_stdout = pytest.mark.skipif(TALKATIVE, reason=f"Gloo of PyTorch {NAME} breaks into the lines of other ranks")


def unsaid(text: str) -> str:
    """What a program has printed, without what Gloo says."""
    return _OF_GLOO.sub("", text) if TALKATIVE else text


def needs(*methods: str) -> pytest.MarkDecorator:
    """PyTorch's TCPStore must have these methods."""
    lacks = sorted({*methods} - METHODS)
    return pytest.mark.skipif(bool(lacks), reason=f"PyTorch {NAME} lacks {', '.join(lacks)}")


def since(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """PyTorch must be so new: before, there was no such thing."""
    return pytest.mark.skipif((major, minor) > VERSION, reason=f"PyTorch {NAME} has no {what}")


def timeout_message(text: str) -> str:
    """How a timeout of PyTorch's client reads, as a pattern; 2.4 does not say more than this."""
    return text if VERSION >= (2, 5) else "^Socket Timeout$"
