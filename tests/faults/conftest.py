"""Lets the tests of this folder import `runs`, `ranks`, and their own table."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "multiprocess"), str(TESTS / "faults")]

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing happened to, by its number of processes; each is trained once."""
    from matrix import UnderFaults

    trained = {}

    def folder(processes: int):
        if processes not in trained:
            run = UnderFaults(tmp_path_factory.mktemp(f"undisturbed-{processes}"), [], processes)
            ended = run.launch()
            assert ended.code == 0, ended.stderr
            trained[processes] = run.folder
        return trained[processes]

    return folder
