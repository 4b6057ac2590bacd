"""The benchmarks: `python -m bench scale`, and scripts that each measure one thing."""
