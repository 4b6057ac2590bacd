"""What `tcpstore doctor` finds out: whether this machine, and the way to a server, are fit for a job.

`names`, `kernel`, `job` and `server` have the checks, whose inputs are arguments; `examination` reads this machine and
runs them. Must not know how findings are printed.
Invariants: nothing is changed on the machine, and nothing but the resolver and the given server is contacted. A check
that hangs becomes a finding.
"""
