"""Lets the tests of this folder import `toy`, and `reference` from the folder above."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
