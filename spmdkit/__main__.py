"""`python -m spmdkit`: the same as the command `spmdkit`."""

# The packages lie beside this folder (see pyproject.toml), where pyright does not look for them.
# pyright: reportMissingImports=false

import sys

from .launch.cli import main

sys.exit(main())
