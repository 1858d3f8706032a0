"""Lets the tests of this folder import `runs` and `left_runs`."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "launch" / "reporting")]
