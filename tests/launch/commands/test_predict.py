"""`spmdkit predict` as it is typed."""

import json

import numpy as np
import pytest
from ranks import start_each, wait
from spmdkit.launch.cli import main

import spmdkit


def read(path):
    with np.load(path) as archive:
        return dict(archive)


def test_a_row_for_each_row_in_order(untrained, tmp_path, capsys):
    words = ["--out", str(tmp_path / "out.npz"), "--keep", "targets,example", "train.global_batch=64"]
    assert main(["predict", str(untrained.parent / "run"), *words]) == 0
    wrote = f"Wrote {tmp_path / 'out.npz'}: predictions 420x10, targets 420, example 420; 3 arrays, "
    assert wrote in capsys.readouterr().out
    found = read(tmp_path / "out.npz")
    np.testing.assert_array_equal(found["example"], np.arange(420))
    alone = spmdkit.load_run(untrained.parent / "run", mesh={})
    rows = [alone.splits.evaluation[index] for index in range(420)]
    np.testing.assert_array_equal(found["targets"], [row["targets"] for row in rows])
    expected = alone.predict({"inputs": np.stack([row["inputs"] for row in rows])})
    np.testing.assert_allclose(found["predictions"], expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_replaced_unless_told(untrained, tmp_path, capsys):
    (tmp_path / "out.npz").write_bytes(b"before")
    words = ["predict", str(untrained), "--out", str(tmp_path / "out.npz")]
    assert main(words) == 2
    assert "out.npz is there already. Choose another name, or give --force to replace it" in capsys.readouterr().err
    assert main([*words, "--force"]) == 2, "no export wrote it"
    assert "--force replaces only what an earlier export wrote" in capsys.readouterr().err
    assert (tmp_path / "out.npz").read_bytes() == b"before"
    (tmp_path / "out.npz").unlink()
    assert main([*words]) == 0
    capsys.readouterr()
    assert main([*words, "--force", "--step", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["arrays"]) == (4, {"predictions": [420, 10]})
    assert read(tmp_path / "out.npz").keys() == {"predictions"}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_write_the_same(untrained, tmp_path):
    words = [untrained.parent / "run", "--keep", "targets", "--out"]
    ended = wait(start_each([("predict", *words, tmp_path / "two.npz")] * 2))
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    assert ["Wrote" in each.stdout for each in ended] == [True, False]
    assert main(["predict", *map(str, words), str(tmp_path / "one.npz")]) == 0
    one, two = read(tmp_path / "one.npz"), read(tmp_path / "two.npz")
    assert one.keys() == two.keys()
    np.testing.assert_array_equal(one["targets"], two["targets"])
    np.testing.assert_allclose(one["predictions"], two["predictions"], rtol=1e-6)
