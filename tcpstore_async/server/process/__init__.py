"""The server of `is_master=True` in a process of its own: the parent side, the child side and their messages."""
