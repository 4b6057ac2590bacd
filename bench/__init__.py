"""Benchmarks.

`python -m bench scale` measures thousands of ranks on every server (bench/README.md); its modules are in `scale`:

    scale/scenarios     every scenario: its name, what its ranks do, sizes, metrics and texts
    scale/start         what the ranks of a job's start send, played over sockets by the load generator in C
    scale/in_memory     the same without sockets; the cost of a rank as the job grows (`python -m bench growth`)
    scale/servers       start the servers under test; connections to them
    scale/runner        which points are measured, in which order, within which time
    scale/results       the machine; the JSON file of a run
    scale/analysis      a run's samples as series, and who is ahead
    scale/figures, scale/report    what readers see

Programs that measure one thing each, started with `python -m bench.NAME` or `python bench/NAME.py`:

    clients       our clients and PyTorch's C++ client, on one server process
    compare       servers under the same load, from the load generator in C (loadgen)
    micro         one command in our own code, without system calls
    turns         the longest time for which one request holds the event loop
    fill          what a server counts against its budget, and the memory that it takes
    stress        tens of thousands of connections, misbehaving clients, and others that watch
    looking       how long it takes to see who is missing
    relays        what relays save and cost
    stores        what a store with a name costs, and how long one waits for its server process
    security      what TLS costs, and whether the time of a refusal says where a forged token differs
    rendezvous    the rendezvous of torchrun's agents
    logged        what a job's ranks leave in the log of a server that has one
    gloo          what PyTorch's switches save when a gloo group is made

All use `processes`, which chooses the build and starts and measures processes, and `stats`, medians and intervals.
"""
