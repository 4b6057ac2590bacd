"""Benchmarks.

`python -m bench scale` measures thousands of ranks on every server (docs/benchmark.md):

    scenarios                   every scenario: its name, sizes, metrics and texts
    workloads, in_memory        what ranks do and what is timed, over sockets and without them
    start, in_memory_start      what the ranks of a job's start send; our sessions serve it without sockets
    loadgen/player              a start's ranks over sockets, played by the load generator in C
    servers, server_process     start the servers under test; what runs in their processes
    runner                      which points are measured, in which order, within which time
    environment, run_file       the machine; the JSON file of a run
    stats, analysis             medians and intervals; who is ahead
    formatting, figures, report, compare    what readers see

Scripts that measure one thing each: clients, micro, scaling, server_ready, stress, fill, turns, gloo, relays (with
relay_process), rendezvous, looking, stores, tls, token_timing, loadgen/compare. `builds` chooses the build, and
`commands` starts commands of `tcpstore`.
"""
