"""What is known about a running store, for those who look in."""
