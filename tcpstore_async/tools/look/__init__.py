"""Commands that look into a running server."""
