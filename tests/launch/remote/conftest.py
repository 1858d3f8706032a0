"""Fixtures of these tests."""

import pytest
from support.remote import begin


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
