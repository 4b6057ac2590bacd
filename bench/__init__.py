"""Benchmarks.

`python -m bench scale` measures thousands of ranks on every server (docs/benchmark.md):

    scenarios       every scenario: its name, sizes, metrics and texts
    workloads       what the ranks of a scenario do, and what is timed
    runner          which points are measured, in which order, within which time
    servers, server_process     start the servers under test; what runs in their processes
    in_memory       our server's sessions driven without sockets
    environment, run_file       the machine; the JSON file of a run
    stats, analysis             medians and intervals; who is ahead
    formatting, figures, report, compare    what readers see

Scripts that measure one thing each: clients, micro, scaling, server_ready, thundering_herd, misbehaving_clients,
loadgen/compare. `builds` chooses the build they measure.
"""
