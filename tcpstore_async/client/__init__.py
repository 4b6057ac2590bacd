"""The clients: synchronous and async, and what they share."""
