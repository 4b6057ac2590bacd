"""The scale benchmark, `python -m bench scale`: thousands of ranks on every server (bench/README.md).

`bench/__init__.py` says what each module is for. Each builds on those before it: servers, start, in_memory, results,
scenarios, runner; and of a run's file: analysis, figures, report.
"""
