"""Make the benchmark, which is not installed, importable from the checkout, after everything else."""

import os
import sys
from pathlib import Path

os.environ["BENCH_BUILD"] = "interpreted"
"""Else what chooses the compiled build, where there is one, does so for all that the tests start after an import."""

sys.path.append(str(Path(__file__).parent.parent.parent))
