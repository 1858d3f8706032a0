"""Lets the tests of this folder import `runs` and `ranks`."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "multiprocess")]
