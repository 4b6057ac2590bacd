"""The documentation is up to date: generated pages, links, and what it says about the code."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import load_tool
from support import LIMIT
from tcpstore_async.base.version import VERSION
from tcpstore_async.cli import main
from test_architecture import LAYERS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tcpstore_async"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("tests/*/*.md"),
        *(page for folder in ("docs", "bench", "examples") for page in (ROOT / folder).rglob("*.md")),
    ]
)
DESIGN = (ROOT / "docs" / "design.md").read_text()

REPOSITORY = "https://github.com/tcpstore-async/tcpstore_async"
RAW = "https://raw.githubusercontent.com/tcpstore-async/tcpstore_async"

BASES = [
    ROOT,
    PACKAGE,
    ROOT / "deploy",
    ROOT / "tests",
    ROOT / "tests" / "simulation",
    ROOT / "tests" / "conformance",
    ROOT / "bench",
]
"""Where a path in a page may begin."""

OF_USERS = {"rank.py", "train.py", "report.md", "run.json", "run-TIME.json", "earlier.json", "loadgen.c", "compare.py"}
"""Files that users have, or whose folder the page has named before."""

OF_OLD_COMMITS = {"bench/spike/doors.py"}


def test_the_wire_page_is_fresh() -> None:
    assert (ROOT / "docs" / "wire.md").read_text() == load_tool("make_wire_doc").render(), "run tools/make_wire_doc.py"


@pytest.mark.parametrize("page", ["reference.md", "compatibility.md"])
def test_what_is_derived_from_the_code_is_fresh(page: str) -> None:
    path = ROOT / "docs" / page
    assert path.read_text() == load_tool("make_reference").render(path), "run tools/make_reference.py"


def test_the_wire_page_has_one_row_per_command() -> None:
    from tcpstore_async.wire.commands import COMMANDS

    text = (ROOT / "docs" / "wire.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", text, re.MULTILINE)
    assert rows == [(str(command.opcode), command.name) for command in COMMANDS]


def test_no_two_pages_have_one_title() -> None:
    pages = {*ROOT.glob("docs/*.md"), *ROOT.glob("bench/**/*.md")} - {ROOT / "docs" / "report.md"}
    titles = [page.read_text().partition("\n")[0] for page in pages]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


# Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{page.name} links to {target}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of headings, as GitHub makes them, and explicit ones."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


# Names of files, classes and functions


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it tells of the past")
    for path in _code(page.read_text()):
        if re.fullmatch(r"[\w./-]+\.(?:py|md|c|json|toml|yml)|(?:bench|docs|examples|tests|tools)/[\w./-]*", path):
            assert path in OF_USERS | OF_OLD_COMMITS or _find(path), f"{page.name} names {path}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_attributes_that_a_page_names_exist(page: Path) -> None:
    for name in _code(page.read_text()):
        owner, _, attribute = name.partition("(")[0].partition(".")
        if owner in _classes() and attribute and "." not in attribute:
            assert attribute in _attributes(owner), f"{page.name} names {name}, which does not exist"


def _code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _find(path: str) -> Path | None:
    return next((base / path for base in BASES if (base / path).exists()), None)


@functools.cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _attributes(name: str) -> set[str]:
    """Return the methods and attributes of the classes of a name, inherited ones included."""
    found: set[str] = set()
    for node in _classes().get(name, []):
        for part in ast.walk(node):
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(part.name)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                found.add(part.attr)
            elif isinstance(part, (ast.Name)) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
        for base in node.bases:
            text = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            if text != name:
                found |= _attributes(text)
    return found


def test_the_attacks_tried_are_tests() -> None:
    """Each row names at least one that is there."""
    _, _, table = (ROOT / "SECURITY.md").read_text().partition("## Attacks tried")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.M)[1:]
    assert len(rows) > 20
    for attack, named in rows:
        tests = re.findall(r"`(tests/[^`]+\.py)::(test_\w+)`", named)
        assert tests, attack
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{attack}: {path} has no {name}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        found = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert found <= targets, f"{page.name} names {found - targets}"


def test_modules_to_run_exist() -> None:
    for page in PAGES:
        for module in re.findall(r"python -m (bench[\w.]*)", page.read_text()):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {module}"


def test_every_relative_link_of_the_readme_is_absolute_on_pypi_and_leads_to_a_file() -> None:
    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    links = re.findall(r"\]\(([^)]+)\)", made)
    assert [link for link in links if not re.match(r"https?://|#", link)] == []
    ours = [re.match(rf"{REPOSITORY}/blob/v{VERSION}/([^#]+)|{RAW}/v{VERSION}/(.+)", link) for link in links]
    there = [found[1] or found[2] for found in ours if found]
    assert len(there) == len(re.findall(r"\]\((?!https?:|#)", (ROOT / "README.md").read_text()))
    assert "docs/page.png" in there
    assert [path for path in there if not (ROOT / path).exists()] == []


# The release

WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text()


@pytest.mark.parametrize(("tag", "fits"), [(f"v{VERSION}", True), ("v99.0", False), (VERSION, False)])
def test_a_tag_of_another_version_is_not_released(tag: str, fits: bool) -> None:
    """The command is that of the workflow."""
    [command] = re.findall(r"run: (.*GITHUB_REF_NAME.*)", WORKFLOW)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": path}
    done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=env, capture_output=True, timeout=LIMIT, check=False)
    assert (done.returncode == 0) == fits, done.stderr


def test_what_is_published_has_been_tried() -> None:
    """The source distribution and the pure wheel; cibuildwheel tries its wheels."""
    job = WORKFLOW.partition("\n  sdist:")[2].partition("\n  wheels:")[0]
    assert '/pip" install dist/*.tar.gz' in job
    assert '/pip" install dist/*.whl' in job
    assert job.count("tools/try_install.py") == 2
    assert job.index("try_install") < job.index("upload-artifact")


# reference.md

REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def test_the_reference_has_every_public_name() -> None:
    import tcpstore_async
    from tcpstore_async import collectives

    mine = {
        name for name, value in vars(collectives).items() if getattr(value, "__module__", "") == collectives.__name__
    }
    names = {*tcpstore_async.__all__, *(name for name in mine if not name.startswith("_"))}
    names |= {name for name in dir(tcpstore_async.Store) if not name.startswith("_")}
    missing = {name for name in names if not re.search(rf"\b{name}\b", REFERENCE)}
    assert not missing


OURS = {
    "TCPStore": {"bind_host", "token", "tls", "token_keys", "require_auth", "server"},
    "FileStore": {"timeout", "new_round"},
    "PrefixStore": {"owns"},
}
"""Arguments that PyTorch's classes do not have."""


@pytest.mark.parametrize("store", OURS)
def test_the_docstrings_explain_our_own_arguments(store: str) -> None:
    import tcpstore_async

    made = getattr(tcpstore_async, store)
    text = f"{made.__doc__} {made.__init__.__doc__}"
    assert {name for name in inspect.signature(made).parameters if f"`{name}`" in text} >= OURS[store]


def test_the_reference_has_every_variable() -> None:
    used = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"\bTCPSTORE_[A-Z]+\b", path.read_text())}
    assert used | {"TCPSTORE_PURE"} == set(re.findall(r"`(TCPSTORE_[A-Z]+)`", REFERENCE))


def test_the_reference_has_every_logger_and_command() -> None:
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    for name in {name for text in sources for name in re.findall(r'getLogger\("tcpstore_async(\.\w+)"', text)}:
        assert f"`{name}`" in REFERENCE or f"`tcpstore_async{name}`" in REFERENCE
    for name in main.commands:
        assert f"`{name}" in REFERENCE


# design.md


def test_the_layers_are_those_of_the_code() -> None:
    listed: dict[str, int] = {}
    layer = -1
    for line in _block("## Layers").splitlines():
        if heading := re.match(r"│ +(\d+)\b", line):
            layer = int(heading[1])
        elif entry := re.match(r"[├└]── (.*)", line):
            for name in re.findall(r"\w+(?=\.py|/)", entry[1].split("  ")[0]):
                listed[name] = layer
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(listed) == there - {"__init__"}
    assert listed == {name: LAYERS[name] for name in listed}


def _block(heading: str) -> str:
    """Return the first code block after a heading."""
    found = re.search(r"```\n(.*?)```", DESIGN[DESIGN.index(heading) :], re.DOTALL)
    assert found
    return found[1]


ANSWERS = re.findall(r"^\| (.+?) \| (.+) \|$", DESIGN.partition("## Where is")[2].partition("\n## ")[0], re.MULTILINE)[
    1:
]


FOREIGN = {"send", "recv", "logging", "TCPStore"}
"""Names in the answers that are not the package's."""


@functools.cache
def _defined(path: Path) -> frozenset[str]:
    """Return the functions, methods, classes and variables that a file, or the files in a folder, define."""
    if path.is_dir():
        return frozenset().union(*(_defined(file) for file in path.rglob("*.py")))
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


@pytest.mark.parametrize(("question", "answer"), ANSWERS, ids=[question for question, _ in ANSWERS])
def test_where_is(question: str, answer: str) -> None:
    """Each file in the answer exists, and defines the names that follow it."""
    names = _code(answer)
    assert names, question
    files = [file for name in names if re.search(r"\.py$|/$", name) and (file := _find(name))]
    for name in names:
        if re.search(r"\.py$|/$", name):
            assert _find(name), f"{question}: there is no {name}"
        elif re.fullmatch(r"_?[A-Za-z]\w*(?:\.\w+)?", name):
            owner, _, attribute = name.partition(".")
            if attribute:
                assert attribute in _attributes(owner), f"{question}: there is no {name}"
            if name not in FOREIGN:
                where = [file.name for file in files]
                assert any(owner in _defined(file) for file in files), f"{question}: {owner} is not defined in {where}"


@pytest.mark.parametrize(
    ("question", "file"),
    [
        ("the meaning of SET", "keyspace/keyspace.py"),
        ("the place where a waiter wakes", "keyspace/waiters.py"),
        ("the limit on keys in a request", "base/limits.py"),
        ("the start of the server process", "server/process/parent.py"),
        ("what a new opcode takes", "wire/commands.py"),
        ("the place where a join is counted", "keyspace/joins.py"),
        ("unsent bytes", "session/unsent.py"),
        ("torchrun's entry", "torchrun.py"),
        ("the drawing of a figure", "bench/scale/figures.py"),
        ("TLS", "server/tls.py"),
    ],
)
def test_where_is_answers_the_questions_of_a_stranger(question: str, file: str) -> None:
    assert file in _code(dict(ANSWERS)[question])
