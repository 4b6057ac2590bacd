"""Change the source in one place at a time and report whether the tests notice.

A mutation flips a comparison or a boolean, exchanges `and` and `or` or plus and minus, drops a `not` or a call whose
result nobody uses, or moves a whole number by one. A seed chooses the places among the modules of the core, so that a
run can be repeated. Each one is tried in a copy of the checkout: nothing here is edited.

    python tools/mutate.py --count 20 --seed 1
    python tools/mutate.py --list tcpstore_async/keyspace/keyspace.py
    python tools/mutate.py --only tcpstore_async/keyspace/keyspace.py:120:8:0 -- tests/unit/keyspace/test_keyspace.py

What no test notices is either a missing test or a mutation that changes nothing that can be seen: read the place.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = [
    "wire", "keyspace", "session", "links", "client", "base/coercion.py", "base/limits.py", "base/deadline.py",
    "server/uv.py", "server/threaded.py", "stores/hash.py", "stores/rank.py",
]  # fmt: skip
"""What is mutated unless files are named, below `tcpstore_async`."""

QUICK = ["tests/unit", "tests/conformance", "tests/properties", "tests/fuzz", "-m", "not slow"]
REST = ["tests/contract", "tests/client", "tests/server", "tests/simulation", "-m", "not slow"]
"""What is run unless arguments for pytest are given after `--`: the quick and telling tests, then, if none of them has
failed, the others.
"""

PER_TEST, PER_RUN = 30, 900
"""Seconds after which a test, or a whole run, counts as having noticed."""

LOGGING = {"debug", "info", "warning", "error", "exception", "log"}

OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    path: Path
    line: int
    column: int
    number: int
    """Tells mutations of the same place apart."""
    before: str
    after: str
    start: int
    stop: int
    """Offsets in bytes."""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.number}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.stop :]


def mutations(root: Path, path: Path) -> list[Mutation]:
    """Every mutation of one file."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutation] = []
    for node, after in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        number = sum((one.line, one.column) == (node.lineno, node.col_offset) for one in found)
        before = " ".join(source[start:stop].decode().split())
        found.append(Mutation(path, node.lineno, node.col_offset, number, before, after, start, stop))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes below this one, each with the text to put in its place. Messages, logs and annotations are left alone."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert) or _logs(node):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("__repr__", "__str__"):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.expr | ast.stmt):
        for after in _texts(node):
            yield node, after
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.arg):
                yield from _changes(child)


def _texts(node: ast.expr | ast.stmt) -> Iterator[str]:
    new: ast.AST = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            new.ops = [OPPOSITE[type(op)]()]
            yield ast.unparse(new)
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
            yield f"({ast.unparse(new)})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(new.operand)})"
        case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.AugAssign(op=ast.Add() | ast.Sub()):
            new.op = ast.Sub() if isinstance(new.op, ast.Add) else ast.Add()
            yield f"({ast.unparse(new)})" if isinstance(new, ast.BinOp) else ast.unparse(new)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "pass"


def _logs(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in LOGGING
    )


def sources(named: list[str]) -> list[Path]:
    """The files to mutate, relative to the checkout."""
    paths = [Path(name) for name in named] or [Path("tcpstore_async", name) for name in CORE]
    found: list[Path] = []
    for path in paths:
        below = [path] if path.suffix else sorted(one.relative_to(ROOT) for one in (ROOT / path).rglob("*.py"))
        found += below
    return found


def copied(target: Path) -> None:
    """Copy the files of the checkout, as they are in its work tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def write(path: Path, source: bytes) -> None:
    """Write a module, and forget its bytecode, which counts as fresh if size and second are the same."""
    path.write_bytes(source)
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink()


def noticed(checkout: Path, pytest: Iterable[str]) -> str | None:
    """What failed first; None if nothing did."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "TCPSTORE_TEST_BUILD": "interpreted"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(Path(sys.executable).with_name("pytest")), "-x", "-q", "--tb=line", "-p", "no:cacheprovider",
               "-o", f"timeout={PER_TEST}", *pytest]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=checkout, env=env, capture_output=True, text=True, timeout=PER_RUN, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {PER_RUN} s"
    if done.returncode == 0:
        return None
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" - ")[0].split(maxsplit=1)[1]
    said = (done.stdout + done.stderr).strip().splitlines()
    return f"pytest ended with {done.returncode}: {said[-1] if said else 'it said nothing'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="what to mutate, such as tcpstore_async/keyspace/keyspace.py")
    parser.add_argument("--count", type=int, default=20, help="how many places (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="chooses them (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="PLACE", help="this place, as --list prints it")
    parser.add_argument(
        "--no-control", action="store_true", help="take it for granted that the tests pass as things are"
    )
    parser.add_argument("--list", action="store_true", help="print what could be mutated and end")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:at])
    runs = [given[at + 1 :]] if given[at + 1 :] else [QUICK, REST]
    files = options.files or sorted({place.split(":")[0] for place in options.only})
    every = [mutation for path in sources(files) for mutation in mutations(ROOT, path)]
    if options.list:
        for one in every:
            print(f"{one.place}: {one.before}  →  {one.after}")
        return 0
    if options.only:
        chosen = [one for one in every if one.place in options.only]
    else:
        chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        checkout = Path(folder)
        copied(checkout)
        before = None if options.no_control else next(filter(None, (noticed(checkout, run) for run in runs)), None)
        if before is not None:
            print(f"the tests fail without a mutation: {before}", file=sys.stderr)
            return 2
        for one in chosen:
            target = checkout / one.path
            original = target.read_bytes()
            began = time.monotonic()
            write(target, one.applied(original))
            found = next(filter(None, (noticed(checkout, run) for run in runs)), None)
            write(target, original)
            missed += found is None
            answer = "NOT NOTICED" if found is None else f"noticed by {found}"
            print(
                f"{one.place}: {one.before}  →  {one.after}\n    {answer} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
