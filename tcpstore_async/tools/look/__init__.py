"""The commands that look into a running server."""
