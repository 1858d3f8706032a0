"""Lets the tests of this folder import `forms_of_names`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
