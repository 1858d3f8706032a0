"""Lets the tests of this folder import `agents`; ends what they start."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agents import begin


@pytest.fixture
def start_agent():
    """Starts agents; what is left of one at the end of a test is killed."""
    started = []

    def start(job, **environment):
        started.append(begin(job, **environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        with process:
            pass
