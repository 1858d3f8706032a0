"""Rows written batch by batch as one .npz."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.runtime.loading.rows_file import check_rows_file, write_rows


def batches():
    for start in (0, 4, 8):
        rows = np.arange(start, min(start + 4, 10))
        yield {
            "predictions/logits": np.repeat(rows[:, None], 3, 1).astype(np.float32),
            "narrow": rows.astype(jnp.bfloat16),
            "right": rows % 2 == 0,
            "none": np.zeros((len(rows), 0), np.int32),
        }


def test_rows_follow_each_other(tmp_path):
    shapes = write_rows(tmp_path / "out.npz", 10, batches())
    with np.load(tmp_path / "out.npz") as archive:
        found = dict(archive)
    assert {name: (array.shape, array.dtype) for name, array in found.items()} == {
        "predictions/logits": ((10, 3), np.float32),
        "narrow": ((10,), np.float32),
        "right": ((10,), np.bool_),
        "none": ((10, 0), np.int32),
    }
    np.testing.assert_array_equal(found["predictions/logits"][:, 1], np.arange(10))
    np.testing.assert_array_equal(found["narrow"], np.arange(10))
    np.testing.assert_array_equal(found["right"], np.arange(10) % 2 == 0)
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]
    assert shapes == {"predictions/logits": (10, 3), "narrow": (10,), "right": (10,), "none": (10, 0)}


def test_an_error_on_the_way_leaves_what_was_there(tmp_path):
    target = tmp_path / "out.npz"
    target.write_bytes(b"before")

    def broken():
        yield next(batches())
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        write_rows(target, 10, broken())
    assert target.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_what_cannot_be_written_is_told_first(tmp_path):
    with pytest.raises(UserError, match=r"are written as \.npz\. Use a name such as out\.npz"):
        check_rows_file(tmp_path / "out.csv", force=False)
    with pytest.raises(UserError, match=r"The directory .*/no for out\.npz is missing"):
        check_rows_file(tmp_path / "no" / "out.npz", force=False)
    (tmp_path / "out.npz").mkdir()
    with pytest.raises(UserError, match=r"is a directory"):
        check_rows_file(tmp_path / "out.npz", force=True)
    (tmp_path / "out.npz").rmdir()
    (tmp_path / "out.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"out\.npz exists\. Choose another name, or give --force"):
        check_rows_file(tmp_path / "out.npz", force=False)
    with pytest.raises(UserError, match="is not an exported file"):
        check_rows_file(tmp_path / "out.npz", force=True)
    (tmp_path / "out.npz").unlink()
    write_rows(tmp_path / "out.npz", 10, batches())
    assert check_rows_file(tmp_path / "out.npz", force=True) == tmp_path / "out.npz"


@pytest.mark.parametrize("path", ["checkpoints/o.npz", "x/../checkpoints/4/o.npz", "../link/o.npz", "logs/o.npz"])
def test_rejects_paths_among_the_files_of_a_run(path, tmp_path):
    run = tmp_path / "run"
    for name in ("checkpoints/4", "logs", "x"):
        (run / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(run / "checkpoints")
    check_rows_file(run / "checkpoints/out.npz", force=False)  # not a run yet
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"which belongs to the run in .*Choose another path"):
        check_rows_file(run / path, force=True)
    assert check_rows_file(run / "x/out.npz", force=False).name == "out.npz"
