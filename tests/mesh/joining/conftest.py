"""Lets the tests of this folder import `job_variables`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
