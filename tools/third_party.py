"""Run small jobs of third-party software with stock PyTorch and then with our stores: `make third-party`.

A virtual environment under build/third-party, which is kept, has PyTorch's CPU build, the checkout's package, and as
many of accelerate, lightning, torchft and ray as can be installed; the others are skipped, with the reason. A mode of
TCPSTORE_INSTALL passes if the job's results equal stock PyTorch's and the server is ours. The jobs use `build/compiled`
if it is up to date, as users get it from pip, otherwise the interpreted checkout.

Two times are printed. *Group* is from the call of `init_process_group` in the last rank to its return in the last rank:
unlike a rank's own time, it does not contain how much later another rank starts. *Since launch* is from the start of
the launcher to the same end; nearly all of it are imports of PyTorch.

A job of any mode, stock included, may end with "terminate called without an active exception": probably a thread of
PyTorch's that needs the GIL while the interpreter exits (pytorch/pytorch#179291, #190489).

A job is a function of this file, run as `python tools/third_party.py --job NAME` in each process of its launcher.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import processes

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "build" / "third-party"
PYTHON: Final = FOLDER / "bin" / "python"

TORCH: Final = "torch==2.13.0+cpu"
CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"

INSTALL_LIMIT: Final = 1800.0
JOB_LIMIT: Final = 240.0
"""Seconds."""

MODES: Final = ("0", "1", "python", "classes", "python,classes")
"""Of TCPSTORE_INSTALL; the first is stock PyTorch."""

TIMES: Final = "THIRD_PARTY_TIMES"
"""The environment variable with the folder to which the processes of a job write their times."""


# What runs in the processes of a job


def note_times() -> None:
    """Have init_process_group write when it was called and when it returned, on a clock that all processes share."""
    import torch.distributed as dist

    stock = dist.init_process_group

    @functools.wraps(stock)
    def timed(*given: Any, **named: Any) -> None:
        called = time.monotonic()
        stock(*given, **named)
        returned = time.monotonic()
        Path(os.environ[TIMES], str(os.getpid())).write_text(f"{called} {returned}")

    dist.init_process_group = timed


def report(result: object) -> None:
    """Print rank 0's report: the result, whose server and store."""
    import torch.distributed as dist

    import tcpstore_async

    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with tcpstore_async.TCPStore(store.host, store.port, timeout=30) as client:
        ours = client._connection().extended()
    print(
        "REPORT",
        json.dumps(
            {
                "result": result,
                "server": "ours" if ours else "PyTorch's",
                "types": isinstance(store, dist.TCPStore),
            }
        ),
        flush=True,
    )


def group_job() -> None:
    """Form a group and sum over it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        report(total.item())
    dist.barrier()
    dist.destroy_process_group()


def accelerate_job() -> None:
    """Train a linear model; the loss does not depend on the store."""
    import torch

    accelerate: Any = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: Any = torch.arange(32.0).reshape(8, 4) / 32
    data: Any = torch.utils.data.DataLoader(numbers, batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    loss: Any = None
    for batch in data:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses = accelerator.gather(loss.detach().reshape(1)).tolist()
    if accelerator.is_main_process:
        report([accelerator.num_processes, [round(one, 5) for one in losses]])
    accelerator.wait_for_everyone()
    accelerator.end_training()


def lightning_job() -> None:
    """Train with a Trainer that starts its second process."""
    import torch

    lightning: Any = importlib.import_module("lightning")
    strategy = importlib.import_module("lightning.pytorch.strategies").DDPStrategy(process_group_backend="gloo")

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.loss = 0.0

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.loss = round(float(loss), 5)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self) -> None:
            if self.trainer.is_global_zero:
                report([self.trainer.world_size, self.loss])
            self.trainer.strategy.barrier()

    torch.manual_seed(1)
    numbers: Any = torch.arange(32.0).reshape(8, 4) / 32
    data: Any = torch.utils.data.DataLoader(numbers, batch_size=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, enable_model_summary=False, **quiet
    )
    trainer.fit(Model(), data)


def torchft_job() -> None:
    """Commit a step with a replica group of one rank, whose manager uses a TCPStore."""
    import torch
    import torch.distributed as dist

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"})
    torchft: Any = importlib.import_module("torchft")
    coordination: Any = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=1)
    store: Any = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=1,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
    )
    manager.start_quorum()
    total = torch.ones(1)
    manager.allreduce(total).wait()
    committed = bool(manager.should_commit())
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    report([committed, total.item(), manager.num_participants()])
    dist.destroy_process_group()
    manager.shutdown(wait=False)
    lighthouse.shutdown()


def ray_job() -> None:
    """Form a group of two tasks."""
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    def join(rank: int, port: int) -> str:
        import contextlib
        import io

        note_times()
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"})
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            group_job()
        return output.getvalue()

    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    task = ray.remote(join)
    print("".join(ray.get([task.remote(rank, port) for rank in range(2)])), flush=True)
    ray.shutdown()


# Jobs


class Job(NamedTuple):
    """One program and how it is launched."""

    package: str
    """The package that it needs; empty if none."""
    run: Callable[[], None]
    launcher: tuple[str, ...] = ()
    server_is_ours: tuple[str, ...] = MODES[1:]


_TORCHRUN: Final = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
_ACCELERATE: Final = ("-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no")

JOBS: Final = {
    "torchrun-static": Job("", group_job, (*_TORCHRUN, "--master-port", "{port}")),
    "torchrun-standalone": Job("", group_job, (*_TORCHRUN, "--standalone")),
    "accelerate": Job(
        "accelerate",
        accelerate_job,
        (
            *_ACCELERATE,
            "--multi_gpu",
            "--num_processes",
            "2",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "{port}",
        ),
    ),
    "lightning": Job("lightning", lightning_job),
    "torchft": Job("torchft", torchft_job),
    "ray": Job("ray", ray_job),
}


def free_port() -> int:
    import socket

    with socket.create_server(("", 0)) as one:
        return int(one.getsockname()[1])


def pip(*given: str) -> str:
    """Install packages; return the error's last line, or an empty string."""
    command = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", *given]
    env = {**os.environ, "TCPSTORE_PURE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT, env=env, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    return "" if done.returncode == 0 else (lines or ["pip failed"])[-1]


def prepare() -> None:
    """Make the environment with PyTorch and this package."""
    if not PYTHON.exists():
        print(f"making {FOLDER}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    why = pip(TORCH) and pip("--index-url", CPU_INDEX, TORCH)
    why = why or pip("--editable", str(ROOT))
    if why:
        sys.exit(f"cannot install: {why}")


def environment(mode: str) -> dict[str, str]:
    """Return the environment for a program in this mode, with the chosen build."""
    env = {key: text for key, text in os.environ.items() if not key.startswith(("TCPSTORE_", "PYTHONPATH"))}
    return env | {"TCPSTORE_INSTALL": mode, "PYTHONPATH": str(processes.chosen_build())}


def run(name: str, mode: str) -> dict[str, Any]:
    """Run a job; return its report with the times in seconds, `group` and `since_launch`; or `error`."""
    job = JOBS[name]
    launcher = [part.format(port=free_port()) for part in job.launcher]
    env = environment(mode) | {"OMP_NUM_THREADS": "1", "RAY_DISABLE_IMPORT_WARNING": "1"}
    env |= {"ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as times:
        env[TIMES] = times
        launched = time.monotonic()
        command = [str(PYTHON), *launcher, str(Path(__file__).resolve()), "--job", name]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=JOB_LIMIT, env=env, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not finished within {JOB_LIMIT:g} s"}
        found = [[float(text) for text in file.read_text().split()] for file in Path(times).iterdir()]
    lines = [line.partition("REPORT ")[2] for line in done.stdout.splitlines() if "REPORT " in line]
    if done.returncode or len(lines) != 1:
        return {"error": f"status {done.returncode}: {done.stderr[-1500:]}"}
    if not found:
        return {"error": "no process has written when its group formed"}
    called, returned = (max(ends) for ends in zip(*found, strict=True))
    return {**json.loads(lines[0]), "group": returned - called, "since_launch": returned - launched}


def judge(name: str, mode: str, found: dict[str, Any], stock: dict[str, Any]) -> str:
    """Return what is wrong, or an empty string."""
    if "error" in found:
        return str(found["error"])
    if found["result"] != stock.get("result"):
        return f"the result is {found['result']}, stock PyTorch's is {stock.get('result')}"
    if not found["types"]:
        return "the store is not a torch.distributed.TCPStore"
    expected = "ours" if mode in JOBS[name].server_is_ours else "PyTorch's"
    return "" if found["server"] == expected else f"the server is {found['server']}"


def describe(runs: list[dict[str, Any]]) -> str:
    """Return the median times of runs, and the shortest time to form a group."""
    group = [1000 * run["group"] for run in runs]
    least = f" (at least {min(group):.1f})" if len(runs) > 1 else ""
    since_launch = statistics.median(run["since_launch"] for run in runs)
    return f"group {statistics.median(group):.1f} ms{least}, since launch {since_launch:.2f} s"


def compare(name: str, modes: list[str], rounds: int) -> int:
    """Run each mode in turn, several times; return how many runs failed, without stock PyTorch's."""
    seen: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    wrong = 0
    stock: dict[str, Any] = {}
    for _ in range(rounds):
        for mode in modes:
            found = run(name, mode)
            stock = found if mode == "0" else stock
            if "error" in stock:
                print(f"{name}: skipped: stock PyTorch fails: {stock['error']}", flush=True)
                return 0
            why = judge(name, mode, found, stock)
            wrong += bool(why)
            if "error" not in found:
                seen[mode].append(found)
            text = why or f"{found['result']}, server {found['server']}, {describe([found])}"
            print(f"{name}, TCPSTORE_INSTALL={mode}: {'FAILED: ' if why else ''}{text}", flush=True)
    for mode, several in seen.items():
        if len(several) > 1:
            print(f"{name}, TCPSTORE_INSTALL={mode}, {len(several)} runs: {describe(several)}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(JOBS)}; default: all")
    parser.add_argument(
        "--modes", nargs="+", default=["1", "python"], choices=MODES, help="in addition to 0, stock PyTorch"
    )
    parser.add_argument("--rounds", type=int, default=1, help="with more than one, print medians")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        note_times()
        JOBS[given.job].run()
        return
    if unknown := sorted({*given.names} - {*JOBS}):
        parser.error(f"unknown job: {', '.join(unknown)}")
    prepare()
    print(f"the package is in {processes.chosen_build()}", flush=True)
    wrong = 0
    for name in given.names or JOBS:
        package = JOBS[name].package
        if package and (why := pip(package, TORCH)):
            print(f"{name}: skipped: {package} cannot be installed: {why}", flush=True)
            continue
        wrong += compare(name, ["0", *dict.fromkeys(mode for mode in given.modes if mode != "0")], given.rounds)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
