"""The report says what was measured, what was not, and that an estimate is one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import run_file
from bench.report import render, write_report, write_report_of
from bench.run_file import Ending, Run
from bench_factories import MACHINE, run, samples

MEMORY = samples("uvloop", [1.0, 1.5, 1.25], transport="memory", size=98_304)
SOCKETS = [
    *samples("uvloop", [0.8, 0.9, 0.85], size=16_384, cpu=0.5),
    *samples("uvloop", [0.8, 0.9, 0.85], size=19_000, cpu=0.38, share=0.95),
    *samples("libuv", [1.0, 1.0, 1.0], size=19_000, cpu=0.40),
    *samples("control", [1.05, 1.05, 1.05], size=19_000, cpu=0.40),
]


def page(what: Run) -> str:
    return render(what, {})


def sentence(text: str) -> str:
    [found] = [line for line in text.splitlines() if line.startswith("**Ours on uvloop initialized")]
    return found


def test_init_at_98304_ranks_is_told_with_its_transport_and_the_estimate() -> None:
    """The estimate is 0.38 s / 19,000 × 98,304."""
    said = sentence(page(run([*SOCKETS, *MEMORY])))
    assert "98,304 ranks in 1.25 s in memory, its sessions driven without sockets" in said
    assert "1.00–1.50" in said
    assert "against the 100 s" in said
    assert "20.0 µs of CPU on each of 19,000 ranks, × 98,304 = 1.97 s of CPU, which is an estimate" in said
    assert said.count(". ") == 0, "one sentence"


def test_real_connections_at_98304_ranks_are_told_instead() -> None:
    measured = [*MEMORY, *samples("uvloop", [2.5, 2.5, 2.5], size=98_304)]
    assert "98,304 ranks in 2.50 s over sockets" in sentence(page(run(measured)))


def test_one_round_has_no_median() -> None:
    said = sentence(page(run(samples("uvloop", [2.5], size=98_304))))
    assert "98,304 ranks in 2.50 s over sockets (one round), against" in said


def test_without_sockets_there_is_no_estimate() -> None:
    said = sentence(page(run(MEMORY)))
    assert "no connections over sockets to estimate from" in said
    assert "=" not in said


def test_without_98304_ranks_the_report_says_so() -> None:
    assert "was not measured in this run" in page(run(SOCKETS))


def test_a_table_has_medians_spread_cpu_ratios_and_saturation() -> None:
    text = page(run(SOCKETS))
    row = next(line for line in text.splitlines() if line.startswith("| 19,000 | ours on uvloop |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == [
        "850 ms (800 ms–900 ms)", "**0.85× (0.76–0.95)**", "20.0 µs (20.0 µs–20.0 µs)", "**0.95× (0.95–0.95)**",
        "10.0 µs", "95% sat.",
    ]  # fmt: skip
    assert "| 19,000 | control (the reference again) | 1.05 s (1.05 s–1.05 s) | 1.05× (1.05–1.05) |" in text


def test_machine_versions_and_method_are_told() -> None:
    text = page(run(SOCKETS))
    for said in (
        "made up",
        "20,000",
        "commit abc1234",
        "2.13.0",
        "0.23.0",
        "8.00 GiB",
        "Rounds are interleaved",
        "| reference | PyTorch libuv |",
    ):
        assert said in text


def test_what_else_of_the_machine_a_number_depends_on_is_told() -> None:
    machine = msgspec.structs.replace(
        MACHINE, backlog=4096, load_average=1.5, server_cores="1", load_cores="0,2", names="files only"
    )
    text = page(msgspec.structs.replace(run(SOCKETS), machine=machine))
    for row in (
        "| cores of the servers; of the load | 1; 0,2 |",
        "| load average of the minute before | 1.50 |",
        "| listen backlog (somaxconn) | 4,096 |",
        "| names of peers, for PyTorch's servers | /etc/hosts, no name server |",
    ):
        assert row in text
    one = msgspec.structs.replace(MACHINE, server_cores="0", load_cores="0")
    assert "| 0 for both, which compete for it |" in page(msgspec.structs.replace(run(SOCKETS), machine=one))


def test_an_older_file_does_not_say_it() -> None:
    text = page(run(SOCKETS))
    for said in (
        "| not pinned, or unknown |",
        "(somaxconn) | unknown |",
        "| unknown, or no such server was measured |",
    ):
        assert said in text


def test_every_scenario_has_its_own_number_of_rounds() -> None:
    few = [*samples("uvloop", [1.0, 1.0], scenario="steady"), *samples("libuv", [1.0], scenario="steady")]
    text = page(run([*SOCKETS, *few], [Ending("fanout", "uvloop", "sockets", 1024, "no time left")]))
    assert "| Store initialization | 3 | " in text
    assert "| Steady load: one CHECK a second from every rank | 1 to 2 | " in text
    assert "| Wake-up: one SET, all ranks wait for it | none | " in text


def test_endings_have_their_reason() -> None:
    """One of a server that has no line says that it was not measured, at whatever size."""
    reason = "it would take 40 minutes"
    endings = [Ending("init", server, "sockets", 32_768, reason) for server in ("libuv", "legacy")]
    text = page(run(SOCKETS, endings))
    assert f"* PyTorch libuv, sockets ends before 32,768: {reason}" in text
    assert f"* PyTorch legacy, sockets not measured: {reason}" in text


def test_an_ending_of_all_operations_is_of_each() -> None:
    measured = samples("libuv", [1.0], scenario="operations-set")
    endings = [Ending("operations", server, "sockets", 2048, "no time") for server in ("libuv", "legacy")]
    text = page(run(measured, endings))
    assert "* PyTorch libuv, sockets ends before 2,048: no time" in text
    assert "* PyTorch legacy, sockets not measured: no time" in text


def test_memory_says_what_one_more_rank_takes() -> None:
    measured = [
        *samples("uvloop", [1.0], scenario="memory", size=1024, memory=30 << 20),
        *samples("uvloop", [1.0], scenario="memory", size=2048, memory=31 << 20),
    ]
    assert "* ours on uvloop: 1.00 KiB for each more rank between 1,024 and 2,048." in page(run(measured))


def test_latencies_have_columns_of_their_own() -> None:
    text = page(run(samples("uvloop", [1.0, 1.0], scenario="steady", p50=1e-3)))
    assert "| 1.00 ms / 2.00 ms / 4.00 ms |" in text


def test_a_scenario_that_nobody_knows_is_told_too() -> None:
    assert "## Something-new" in page(run(samples("uvloop", [1.0], scenario="something-new")))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (run(SOCKETS, reference=""), "| reference | none: there are no ratios |"),
        (run(complete=False), "**Nothing was measured.**"),
        (run(SOCKETS, complete=False), "**This run is not complete**"),
        (run(samples("uvloop", [1.0])), "Nothing to compare: only ours on uvloop, sockets"),
        (run(samples("libuv", [1.0])), "Nothing to compare: only PyTorch libuv, sockets"),
        (run([*samples("uvloop", [1.0]), *samples("libuv", [2.0])]), "0.50× (one round, no interval)"),
        (run(samples("uvloop", [1.0])), "none: noise unknown"),
        (run([*samples("uvloop", [0.1] * 3), *samples("libuv", [1.0] * 3)]), "| 0.10× (noise unknown) |"),
        (
            run([], [Ending("init", "libuv", "sockets", 1024, "no PyTorch")]),
            "PyTorch libuv, sockets not measured: no PyTorch",
        ),
        (run(samples("libuv", [1.0], scenario="memory", memory=0)), "| PyTorch libuv | 0 B (one round) |"),
        (run(samples("uvloop", [1.0], cpu=0.0)), "| – | – |"),
        (run(samples("neither", [1.0], transport="memory")), "only neither, memory (no sockets)"),
    ],
)
def test_a_run_of_whatever_there_is_has_a_report(what: Run, said: str) -> None:
    assert said in page(what)


def test_a_report_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write(run(SOCKETS), tmp_path / "run.json")
    for folder in (tmp_path, tmp_path / "new"):
        assert write_report_of(tmp_path / "run.json", folder) == 0
        assert capsys.readouterr().out == f"{folder / 'report.md'}\n"
    assert (tmp_path / "new" / "report.md").read_bytes() == (tmp_path / "report.md").read_bytes()


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    folder: str,
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.report._figures", lambda run: {})
    run_file.write(run(SOCKETS), Path("run.json"))
    Path("broken.json").write_text("{")
    Path("folder/report.md").mkdir(parents=True)
    Path("full").mkdir()
    Path("full/report.md").symlink_to("/dev/full")
    assert write_report_of(Path(file), Path(folder)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(error)
    assert err.count("\n") == 1


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.report.find_spec", lambda name: None)
    [written] = write_report(run(SOCKETS), tmp_path)
    text = written.read_text()
    assert "No figures: matplotlib is not installed" in text
    assert "| 19,000 | ours on uvloop |" in text


def test_the_report_shows_every_figure(tmp_path: Path) -> None:
    written = write_report(run([*SOCKETS, *samples("uvloop", [1.0], scenario="steady")]), tmp_path)
    assert [file.name for file in written] == ["report.md", "init.png", "init.svg", "steady.png", "steady.svg"]
    text = written[0].read_text()
    assert "![Store initialization](init.png)" in text
    assert "(steady.png)" in text
