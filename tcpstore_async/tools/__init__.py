"""Tools for operators and benchmarks. Nothing outside imports them: they are found by name."""
