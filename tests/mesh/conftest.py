"""Fresh Python processes, for what can only be seen before JAX opens its devices."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def run_python():
    """Runs code in a new process without this one's JAX settings; gives its output, or fails with its errors."""

    def run(code: str, **environment: str) -> str:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "SPMDKIT_"))}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
