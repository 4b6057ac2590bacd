"""Sans-I/O sessions: bytes to commands, results to bytes. No asyncio, threads, time or logging."""
