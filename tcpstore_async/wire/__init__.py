"""The wire format, for both ends: codecs and the command table. No state, clock or socket."""
