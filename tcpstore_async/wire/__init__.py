"""Bytes: what can be said on the wire, by both ends. No state, clock or socket."""
