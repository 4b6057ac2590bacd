"""Load for a running server: many connections from few processes, and how long each request took."""
