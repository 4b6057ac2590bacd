"""The server of `is_master=True`, in a process of its own.

`parent` starts and stops it, and `log_reader` logs its output: they run in the master, the server's owner. `child` is
the server process. `protocol` has the messages between the two; `pidfd` waits for a process that is not a child.
"""
