"""What goes on in a server, over HTTP: metrics, health, and a page for whoever finds out why a job does not start.

It runs in a process of its own that asks the server over the admin socket. Values are never shown.
"""
