"""Benchmarks.

`python -m bench scale` measures thousands of ranks on every server (docs/benchmark.md), with the modules of `scale`:

    scenarios                   every scenario: its name, sizes, metrics and texts
    workloads, in_memory        what ranks do and what is timed, over sockets and without them
    start, in_memory_start      what the ranks of a job's start send; our sessions serve it without sockets
    loadgen/player              a start's ranks over sockets, played by the load generator in C
    servers                 start the servers under test
    runner                      which points are measured, in which order, within which time
    environment, results        the machine; the JSON file of a run
    stats, analysis             medians and intervals; who is ahead
    formatting, figures, report, comparison    what readers see

Programs that measure one thing each, started with `python -m bench.NAME`:

    clients             our clients and PyTorch's C++ client, on one server process
    compare             servers under the same load, from the load generator in C
    micro               one command in our own code, without system calls
    scaling             a rank, as the job grows, without sockets
    turns               the longest time for which one request holds the event loop
    fill                what a server counts against its budget, and the memory that it takes
    stress              tens of thousands of connections, misbehaving clients, and others that watch
    server_ready        how long `is_master=True` waits for its server process
    gloo                what PyTorch's switches save when a gloo group is made
    rendezvous          the rendezvous of torchrun's agents
    relays              what relays save and cost (relay_process: relays under test)
    stores              what a store with a name costs
    security            what TLS costs
    looking             how long it takes to see who is missing
    token_timing        whether the time of a refusal says where a forged token differs

Both use `processes`, what servers under test run in, `builds`, which chooses the build, and `commands`, which
starts commands of `tcpstore`.
"""
