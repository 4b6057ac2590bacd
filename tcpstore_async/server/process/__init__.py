"""The server of `is_master=True`, in a process of its own.

`parent` starts and stops it, and `log_reader` logs what it writes: they run in the master, the server's owner.
`child` is the server process. `protocol` is what the two send each other; `pidfd` names a process that is not a child.
"""
