"""`python -m spmdkit`: the same as the command `spmdkit`."""

import sys

from .launch.cli import main

sys.exit(main())
