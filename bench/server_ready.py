"""Measure how long `is_master=True` waits for its server process: `python bench/server_ready.py --starts 60`.

A start is what a master does before its first request: bind, listen, start the process, wait until it is ready. Run it
on an idle machine. `PYTHONPATH=build/compiled`, from another directory, measures the compiled build.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

from tcpstore_async.server.master import host
from tcpstore_async.serving import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=60)
    options = parser.parse_args()
    starts, stops = [], []
    began = time.perf_counter()
    host(0).release()
    first = time.perf_counter() - began
    for _ in range(options.starts):
        began = time.perf_counter()
        hosted = host(0)
        ready = time.perf_counter()
        hosted.release()
        starts.append(ready - began)
        stops.append(time.perf_counter() - ready)
    print(f"{build()} build, {options.starts} starts, server in a {os.environ.get('TCPSTORE_SERVER') or 'process'}")
    print(f"machine: {os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}")
    print(f"first start and stop, imports included: {first * 1000:.1f} ms")
    _print("start to ready", starts)
    _print("stop to port free", stops)


def _print(what: str, seconds: list[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    print(f"{what:>18}: " + ", ".join(f"p{cut} {cuts[cut - 1] * 1000:.1f} ms" for cut in (50, 95, 99)))


if __name__ == "__main__":
    main()
