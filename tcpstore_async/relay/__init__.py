"""The relay: stock clients of one host connect to it as to a server, and share one connection, a link, to the server.

`core` moves bytes, `upstream` keeps the link's connection, `running` assembles both. The only commands known here
identify, authenticate and enter; no key or value is kept.
"""
