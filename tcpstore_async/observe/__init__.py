"""Facts about the sessions and keys of a running store."""
