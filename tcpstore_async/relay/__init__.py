"""The relay: stock clients of one host connect to it as to a server, and share one connection, a link, to the server.

`core` moves bytes, `upstream` keeps the link's connection, `running` assembles both. No module here knows a command but
those that ask the server who it is, and none keeps a key or a value.
"""
