"""Their own table."""

import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing happened to, by its number of processes; each is trained once."""
    from support.matrix import UnderFaults

    trained = {}

    def folder(processes: int):
        if processes not in trained:
            run = UnderFaults(tmp_path_factory.mktemp(f"undisturbed-{processes}"), [], processes)
            ended = run.launch()
            assert ended.code == 0, ended.stderr
            trained[processes] = run.folder
        return trained[processes]

    return folder
