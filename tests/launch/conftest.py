"""Lets the tests of this folder import `runs`, `ranks` and `bad_places`."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "multiprocess"), str(Path(__file__).parent)]
