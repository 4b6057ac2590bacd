"""Load generation: many connections to a running server from few processes, with the latency of each request."""
