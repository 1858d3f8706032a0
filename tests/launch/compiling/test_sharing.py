"""Real processes agree on the programs that all of them see."""

import json
import subprocess
import sys

import jax
import pytest
from spmdkit.launch.compiling.sharing import MARK, NOT_ONE, Shared, _list_in, agree
from spmdkit.launch.supervision.ports import free_port

RANK = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
address, rank, cases = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
jax.distributed.initialize(address, 2, rank)
from spmdkit.launch.compiling.sharing import agree
from spmdkit.mesh.compat import coordination_client
from spmdkit.mesh.coordination import wait_for_all
for number, (kind, folder, kept) in enumerate(cases):
    found = agree(kind, Path(folder) if folder else None, kept, 30.0)
    print(json.dumps([found.problem, found.keys if found.keys is None else sorted(found.keys)]), flush=True)
    wait_for_all(f"agreed {number}", seconds=30.0)
    for said in ("cache", "cache is seen"):  # a run agrees once
        coordination_client().key_value_delete(f"spmdkit/{said}/{rank}")
    wait_for_all(f"forgotten {number}", seconds=30.0)
"""
CASES = {
    # kinds of both, folders of both ("" = none, "gone" is not there), keys that both see: problem, keys
    "what both see is read": ("ours ours", ("one", "one"), ("ab", "bc"), ["", ["b"]]),
    "what process 0 lacks is not": ("ours ours", ("one", "one"), ("b", "abc"), ["", ["b"]]),
    "nothing is kept yet": ("ours ours", ("one", "one"), ("", ""), ["", []]),
    "two folders": ("jax jax", ("one", "two"), ("a", "a"), [NOT_ONE, None]),
    "a folder and a bucket": ("ours bucket", ("one", ""), ("a", ""), [NOT_ONE, None]),
    "a bucket and a folder": ("bucket ours", ("", "one"), ("", "a"), [NOT_ONE, None]),
    "one folder, which two look after": ("jax ours", ("one", "one"), ("a", "a"), [NOT_ONE, None]),
    "one bucket": ("bucket bucket", ("", ""), ("", ""), ["", None]),
    "two buckets": ("bucket other", ("", ""), ("", ""), [NOT_ONE, None]),
    "a folder that cannot be written": ("ours ours", ("gone", "gone"), ("a", "a"), [NOT_ONE, None]),
}


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """What two processes found in each case, and what is left in the folders."""
    root = tmp_path_factory.mktemp("programs")
    for name in ("one", "two"):
        (root / name).mkdir()
    of_rank = [
        [
            (kinds.split()[rank], str(root / folders[rank]) if folders[rank] else "", list(kept[rank]))
            for kinds, folders, kept, _ in CASES.values()
        ]
        for rank in (0, 1)
    ]
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, "-c", RANK, address, str(rank), json.dumps(of_rank[rank])] for rank in (0, 1)]
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        found.append([json.loads(line) for line in out.splitlines()])
    return dict(zip(CASES, zip(*found, strict=True), strict=True)), [*root.rglob("*.*")]


def test_a_run_of_one_process_asks_nobody(tmp_path):
    assert jax.process_count() == 1
    assert agree("ours", tmp_path / "nowhere", (), 0.0) == Shared("", None)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_both_come_to_the_same(name, agreed):
    found, _ = agreed
    assert found[name] == (CASES[name][-1],) * 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_mark_is_left(agreed):
    _, left = agreed
    assert left == []


@pytest.mark.parametrize(
    ("text", "keys"), [('["a", "b"]', {"a", "b"}), ("[]", set()), ('["a", ', None), ("", None), (None, None)]
)
def test_a_list_that_cannot_be_read_is_none(text, keys, tmp_path):
    mark = tmp_path / f"x{MARK}"
    if text is not None:
        mark.write_text(text)
    assert _list_in(mark) == keys
