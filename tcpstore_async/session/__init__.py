"""Bytes to meaning and back, without I/O: no asyncio, threads, time or logging."""
