"""The examples that need PyTorch run, and print what they should."""

from __future__ import annotations

from example_runs import EXAMPLES, forked_lines_of, forked_torchrun, forked_torchrun_lines_of, lines_of, run, run_forked
from support import tcpstore_server
from versions import alone_on_stdout, since

takes_our_handler = since(2, 6, "torchrun handlers of other packages")


@alone_on_stdout
def test_urls(port: int) -> None:
    assert lines_of("urls.py", port) == [f"2 ranks met by {scheme}://" for scheme in ("tcp", "env", "file")]


@alone_on_stdout
def test_explicit_store(port: int) -> None:
    assert forked_lines_of("explicit_store.py", port) == ["the sums of all ranks: 3, 3, 3"]


@alone_on_stdout
def test_sgd(port: int) -> None:
    *epochs, last = forked_lines_of("sgd.py", port, attempts=4)
    losses = [float(line.partition("loss ")[2]) for line in epochs]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert last == "the same model on every rank: True"


def test_ddp(port: int) -> None:
    first, second = run_forked("ddp.py", world=2, attempts=4, MASTER_PORT=str(port))
    assert first.count("loss") == 5
    assert second == ""


@takes_our_handler
def test_ddp_under_torchrun(port: int) -> None:
    endpoint = ["--nproc-per-node=2", "--rdzv-backend=tcpstore", f"--rdzv-endpoint=localhost:{port}"]
    conf = ["--rdzv-conf=last_call_timeout=1"]
    printed = forked_torchrun(*endpoint, *conf, EXAMPLES / "ddp.py", attempts=4)
    assert sum("loss" in line for line in printed) == 5


@alone_on_stdout
def test_survive(port: int) -> None:
    printed = lines_of("survive.py", port)
    assert sum("resumed the link" in line for line in printed) >= 1
    *killed, last = [line for line in printed if " relay: " not in line]
    assert [line.partition(",")[0] for line in killed] == [f"step {step}: killed the server" for step in (5, 15, 25)]
    assert last == "the ranks ended with 0 0"


@alone_on_stdout
def test_ring_allreduce(port: int) -> None:
    sums = [10.0 * number for number in range(10)]
    assert forked_lines_of("ring_allreduce.py", port) == [f"the same as PyTorch's all_reduce: {sums}"]


@alone_on_stdout
def test_many_groups() -> None:
    printed = forked_lines_of("many_groups.py")
    assert sorted(printed) == [
        *["engine 0: sum 1"] * 3, *["engine 1: sum 5"] * 3, "stores that are left: 0",
    ]  # fmt: skip


def test_missing_rank(port: int) -> None:
    printed = forked_lines_of("missing_rank.py", port)  # among them what PyTorch's C++ side has to say
    monitored, collectives = [line for line in printed if line.startswith(("monitored", "StoreCollectives"))]
    assert "2 failed to pass monitoredBarrier" in monitored
    assert collectives == "StoreCollectives: missing are [2]"


@takes_our_handler
def test_daemon_and_torchrun(port: int) -> None:
    printed = [
        line for line in forked_torchrun_lines_of("daemon_and_torchrun.py", port) if line.startswith(("4 ranks", "job"))
    ]
    assert printed == ["4 ranks, sum 6", "job first: done", "4 ranks, sum 6", "job second: done"]


@since(2, 5, "autoload")
def test_the_environment_alone(port: int) -> None:
    printed = run(str(EXAMPLES / "train.py"), world=2, MASTER_PORT=str(port), TCPSTORE_INSTALL="1")
    assert printed == ["2 ranks, sum 1\n", ""]
    with tcpstore_server() as server:
        printed = run_forked(
            "train.py",
            world=2,
            MASTER_ADDR="job-1",
            MASTER_PORT="1",
            TCPSTORE_INSTALL="1",
            TCPSTORE_SERVER_URL=f"tcp://127.0.0.1:{server.port}",
        )
    assert printed == ["2 ranks, sum 1\n", ""]
