"""The report: what was measured, what was not, and which numbers are estimates."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.scale import results
from bench.scale.report import render, write_report, write_report_of
from bench.scale.results import Ending, Job, Run
from bench_factories import MACHINE, run, samples

MEMORY = samples("uvloop", [1.0, 1.5, 1.25], transport="memory", size=98_304)
SOCKETS = [
    *samples("uvloop", [0.8, 0.9, 0.85], size=16_384, cpu=0.5),
    *samples("uvloop", [0.8, 0.9, 0.85], size=19_000, cpu=0.38, share=0.95),
    *samples("libuv", [1.0, 1.0, 1.0], size=19_000, cpu=0.40),
    *samples("control", [1.05, 1.05, 1.05], size=19_000, cpu=0.40),
]
FEW = [*samples("uvloop", [1.0, 1.0], scenario="steady", p50=1e-3), *samples("libuv", [1.0], scenario="steady")]
GROWING = [
    *samples("uvloop", [1.0], scenario="memory", size=1024, memory=30 << 20),
    *samples("uvloop", [1.0], scenario="memory", size=2048, memory=31 << 20),
    *samples("libuv", [1.0], scenario="memory", size=2048, memory=0),
]
ENDINGS = [
    *(Ending("init", server, "sockets", 32_768, "no time") for server in ("libuv", "legacy")),
    *(Ending("operations", server, "sockets", 2048, "too slow") for server in ("libuv", "legacy")),
    Ending("fanout", "uvloop", "sockets", 1024, "no PyTorch"),
]
DESCRIBED = msgspec.structs.replace(
    MACHINE, backlog=4096, load_average=1.5, server_cores="1", load_cores="0,2", names="files only"
)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        (
            run([*SOCKETS, *MEMORY]),
            [
                "98,304 ranks in 1.25 s in memory, its sessions driven without sockets (median of 3 rounds, 1.00–1.50)",
                "against the 100 s",
                # 0.38 s / 19,000 × 98,304
                "20.0 µs of CPU on each of 19,000 ranks, × 98,304 = 1.97 s of CPU, which is an estimate",
            ],
        ),
        (run([*MEMORY, *samples("uvloop", [2.5], size=98_304)]), ["98,304 ranks in 2.50 s over sockets (one round), "]),
        (run(MEMORY), ["no connections over sockets to estimate from"]),
        (run(SOCKETS), ["Initialization of 98,304 ranks, ", "was not measured in this run"]),
    ],
)
def test_the_headline_names_the_transport(what: Run, texts: list[str]) -> None:
    [headline] = [line for line in render(what, {}).splitlines() if "98,304 ranks" in line]
    for text in texts:
        assert text in headline
    assert headline.count(". ") == 0, "one sentence"


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        (
            run(SOCKETS),
            [
                "| 19,000 | ours on uvloop | 850 ms (800 ms–900 ms) | **0.85× (0.76–0.95)** "
                "| 20.0 µs (20.0 µs–20.0 µs) | **0.95× (0.95–0.95)** | 10.0 µs | 95% sat. |",
                "| 19,000 | control (the reference again) | 1.05 s (1.05 s–1.05 s) | 1.05× (1.05–1.05) |",
                "| reference | PyTorch libuv |",
                "| tcpstore_async | 0.1.0, compiled, commit abc1234 |",
                # not in older files
                "| cores of the servers; of the load | not pinned, or unknown |",
                "(somaxconn) | unknown |",
            ],
        ),
        (
            msgspec.structs.replace(run(SOCKETS), machine=DESCRIBED),
            [
                "| cores of the servers; of the load | 1; 0,2 |",
                "| load average of the minute before | 1.50 |",
                "| listen backlog (somaxconn) | 4,096 |",
                "| names of peers, for PyTorch's servers | /etc/hosts, no name server |",
            ],
        ),
        (
            run([*SOCKETS, *FEW, *samples("libuv", [1.0], scenario="operations-set")], ENDINGS),
            [
                "| Store initialization | 3 | ",
                "| Steady load: one CHECK a second from every rank | 1 to 2 | ",
                "| Wake-up: one SET, all ranks wait for it | none | ",
                "| 1.00 ms / 2.00 ms / 4.00 ms |",
                "* PyTorch libuv, sockets ends before 32,768: no time",
                "* PyTorch legacy, sockets not measured: no time",
                "* PyTorch libuv, sockets ends before 2,048: too slow",
                "* PyTorch legacy, sockets not measured: too slow",
                "* ours on uvloop, sockets not measured: no PyTorch",
            ],
        ),
        (
            run(GROWING),
            [
                "* ours on uvloop: 1.00 KiB for each more rank between 1,024 and 2,048.",
                "| PyTorch libuv | 0 B (one round) |",
            ],
        ),
        (run(SOCKETS, reference="", complete=False), ["| none: there are no ratios |", "**This run is not complete**"]),
        (run(complete=False), ["**Nothing was measured.**"]),
        (
            run([*samples("uvloop", [0.1] * 3, cpu=0.0), *samples("libuv", [1.0] * 3)]),
            ["| 0.10× (noise unknown) | – | – |", "| control | none: noise unknown |"],
        ),
        (run(samples("unknown", [1.0], scenario="new", transport="memory")), ["## New", "only unknown, memory (no "]),
    ],
)
def test_the_report(what: Run, texts: list[str]) -> None:
    page = render(what, {})
    for text in texts:
        assert text in page


def test_a_report_has_its_figures_and_can_be_redrawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_report(run([*SOCKETS, *FEW]), tmp_path / "deeper" / "still")
    assert [file.name for file in written] == ["report.md", "init.png", "init.svg", "steady.png", "steady.svg"]
    text = written[0].read_text()
    assert "![Store initialization](init.png)" in text
    assert "(steady.png)" in text
    results.write(run([*SOCKETS, *FEW]), tmp_path / "run.json")
    assert write_report_of(tmp_path / "run.json", tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.md'}\n"
    assert all((tmp_path / file.name).read_bytes() == file.read_bytes() for file in written)


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.scale.report.find_spec", lambda name: None)
    [written] = write_report(run(SOCKETS), tmp_path)
    text = written.read_text()
    assert "No figures: matplotlib is not installed" in text
    assert "| 19,000 | ours on uvloop |" in text


@pytest.mark.parametrize(
    ("file", "folder", "error"),
    [
        ("nothing.json", "new", "nothing.json: No such file or directory\n"),
        ("broken.json", "new", "broken.json: not a benchmark run: "),
        ("run.json", "run.json", "run.json: File exists\n"),
        ("run.json", "folder", "folder/report.md: Is a directory\n"),
        ("run.json", "full", "full/report.md: No space left on device\n"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str, folder: str,
    error: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.scale.report._figures", lambda run: {})
    results.write(run(SOCKETS), Path("run.json"))
    Path("broken.json").write_text("{")
    Path("folder/report.md").mkdir(parents=True)
    Path("full").mkdir()
    Path("full/report.md").symlink_to("/dev/full")
    assert write_report_of(Path(file), Path(folder)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(error)
    assert err.count("\n") == 1


def test_a_start_is_named_by_its_job(tmp_path: Path) -> None:
    started = [*samples("uvloop", [1.0], scenario="start"), *samples("uvloop", [1.0], scenario="start-spread")]
    megatron = Job("nccl2", "12x128:nccl2,2x512:gloo", "within 10 s", "megatron")
    jobs = {"start": Job("gloo", "", "at once"), "start-spread": megatron}
    page = write_report(run(started, jobs=jobs), tmp_path)[0].read_text()
    svg = (tmp_path / "start-spread.svg").read_text()
    titles = [
        "The start of a job: gloo, ranks arrive at once",
        "The start of a job: megatron (nccl2, groups 12x128:nccl2,2x512:gloo), ranks arrive within 10 s",
    ]
    assert [line for line in page.splitlines() if line.startswith("## The start")] == [f"## {one}" for one in titles]
    assert f"| {titles[0]} | 1 |" in page
    assert f">{titles[1]}<" in svg
    assert "## The start of a job\n" in render(run(started), {}), "an older file"
