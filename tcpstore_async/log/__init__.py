"""The events that enter a server's stores: noted, and executed again."""
