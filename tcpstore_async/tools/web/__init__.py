"""The state of a server over HTTP: metrics, health checks, and a page that shows why a job does not start.

It runs in a process of its own that queries the server over the admin socket. Values are never shown.
"""
