"""Real processes agree on the programs that all of them see."""

import json
import subprocess
import sys

import jax
import pytest
from spmdkit.launch.compiling.sharing import NOT_ONE, Shared, agree
from spmdkit.launch.supervision.ports import free_port

RANK = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
address, rank, kind, folder, *kept = sys.argv[1:]
jax.distributed.initialize(address, 2, int(rank))
from spmdkit.launch.compiling.sharing import agree
found = agree(kind, Path(folder) if folder else None, kept, 30.0)
print(json.dumps([found.problem, found.keys if found.keys is None else sorted(found.keys)]))
"""


def agreed(*ranks):
    """What two processes found, whose kind, folder and keys are given."""
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, "-c", RANK, address, str(rank), *map(str, words)] for rank, words in enumerate(ranks)]
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    return found


def test_a_run_of_one_process_asks_nobody(tmp_path):
    assert jax.process_count() == 1
    assert agree("ours", tmp_path / "nowhere", (), 0.0) == Shared("", None)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_only_what_both_see_is_read(tmp_path):
    ranks = [("ours", tmp_path, "a", "b"), ("ours", tmp_path, "b", "c")]
    assert agreed(*ranks) == [["", ["b"]]] * 2
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kinds", "folders"), [(["jax", "jax"], ["one", "two"]), (["ours", "a bucket"], ["one", ""])], ids=["jax", "bucket"]
)
def test_two_folders_are_not_used(kinds, folders, tmp_path):
    places = [tmp_path / name if name else "" for name in folders]
    for place in filter(None, places):
        place.mkdir()
    assert agreed(*zip(kinds, places, strict=True)) == [[NOT_ONE, None]] * 2
