"""Find out which build of the package the tests import.

Knows: what setup.py compiles, where Python finds it. Must not know: pytest.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import tcpstore_async

ROOT = Path(__file__).parent.parent
HINTS = {
    "compiled": "`TCPSTORE_PURE=0 pip wheel --no-deps .` says why",
    "interpreted": "TCPSTORE_TEST_BUILD=compiled tests the compiled one",
}


def why_unusable(wanted: str) -> str | None:
    """Return why this run cannot test the wanted build; None if it can."""
    package = Path(tcpstore_async.__file__).parent
    names = compiled_names()
    others = [name for name in names if kind(name) != wanted]
    if others:
        found = f"finds {len(others)} of {len(names)} modules otherwise in {package}, {others[0]} first"
        hint = HINTS.get(wanted, "there is no such build")
        return f"this run is to test the {wanted} build of tcpstore_async, but {found}; {hint}"
    if wanted == "compiled" and sources(package) != sources(ROOT / "tcpstore_async"):
        return f"the compiled build in {package} is stale: its sources are not the checkout's; run `make compile`"
    return None


def compiled_names() -> list[str]:
    """Return the modules that are extension modules in a compiled build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            return [path.removesuffix(".py").replace("/", ".") for path in ast.literal_eval(node.value)]
    raise LookupError("setup.py has no COMPILED")


def kind(name: str) -> str:
    """Return how a module runs: `interpreted`, `compiled` or `missing`."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "missing"
    return "interpreted" if spec.origin.endswith(".py") else "compiled"


def sources(package: Path) -> dict[Path, bytes]:
    return {path.relative_to(package): path.read_bytes() for path in package.rglob("*.py")}
