"""torchrun on a running server that outlives the job: `python examples/daemon_and_torchrun.py [PORT]`.

To do the same by hand, run the first command on a machine that stays up, and the second on each of two nodes:

    tcpstore serve --host :: --port 29400
    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=tcpstore --rdzv-endpoint=HOST:29400 --rdzv-id=JOB train.py
"""

import subprocess
import sys
from pathlib import Path

PYTHON = sys.executable
TRAIN = str(Path(__file__).with_name("train.py"))


def agent(port: int, job: str) -> "subprocess.Popen[bytes]":
    rendezvous = ["--rdzv-backend=tcpstore", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={job}"]
    nodes = ["--nnodes=2", "--nproc-per-node=2"]
    return subprocess.Popen([PYTHON, "-m", "torch.distributed.run", *nodes, *rendezvous, TRAIN])


def main(port: int) -> int:
    serve = [PYTHON, "-m", "tcpstore_async", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()  # it prints one line once it is ready to accept connections
        try:
            failed = 0
            for job in ("first", "second"):
                failed += sum(one.wait() != 0 for one in [agent(port, job) for _ in range(2)])
                print(f"job {job}: done", flush=True)
        finally:
            server.terminate()
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 29400))
