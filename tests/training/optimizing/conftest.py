"""Lets the tests of this folder import `small_optimizations`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
