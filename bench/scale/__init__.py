"""The scale benchmark, `python -m bench scale`: thousands of ranks on every server (docs/benchmark.md)."""
