"""`tcpstore doctor`: checks whether this machine, and the connection to a server, are fit for a job.

`names`, `kernel`, `job`, `server` and `etcd` contain the checks, whose inputs are arguments; `examination` reads this
machine and runs them. Must not know how findings are printed. Invariants: nothing is changed on the machine, and
nothing but the resolver, the given server and the given etcd is contacted. A check that hangs becomes a finding.
"""
