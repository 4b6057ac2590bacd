"""The benchmark is in no package that is installed: its folder is found in the checkout, after everything else."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent))
