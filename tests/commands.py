"""Run commands of `tcpstore` in the process of a test, and load the programs in tools/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from click.testing import CliRunner, Result

from support import Server
from tcpstore_async.cli import main


def run_command(server: Server | None, *words: str) -> Result:
    """Run a command, on a server if one is given."""
    url = ["--url", f"tcp://127.0.0.1:{server.port}"] if server is not None else []
    return CliRunner().invoke(main, [*words, *url])


def load_tool(name: str) -> ModuleType:
    """Import a module of tools/, which is no package."""
    path = Path(__file__).parent.parent / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
