"""Make the benchmark, which is not installed, importable from the checkout, after everything else."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent))
