"""Lets the tests of this folder import `runs`, `slurm_lab`, `leftovers` and `sshd`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
