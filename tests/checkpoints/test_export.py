import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from spmdkit.checkpoints import export as export_file
from spmdkit.checkpoints import restore as restore_file
from spmdkit.checkpoints.damage import CheckpointError, DamagedCheckpoint
from spmdkit.checkpoints.export import export, npy_dtype
from spmdkit.checkpoints.restore import StoredCheckpoint
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.mesh.errors import UserError
from support.checkpoint_states import ABOUT, State, run_state, write
from support.faults import damage
from support.runs import unchanged

KINDS = ["out.safetensors", "out"]


def read(path):
    """The arrays of what was exported, by name."""
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    return {str(file.relative_to(path).with_suffix("")): np.load(file, mmap_mode="r") for file in path.rglob("*.npy")}


def assert_equal(found, expected, kind):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        if array.dtype.kind == "V" and kind != "out.safetensors":
            array = array.astype(np.float32)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_read_back_equal(stored, tmp_path, kind):
    exported = export(stored, tmp_path / kind)
    assert_equal(read(tmp_path / kind), dict(leaves_with_paths(run_state(20).params)), kind)
    assert os.listdir(tmp_path) == [kind]
    wide = "; 1 of them as float32, since NumPy does not have their dtype" if kind != "out.safetensors" else ""
    assert str(exported) == f"Wrote {tmp_path / kind}: 2 arrays, 1.5 KiB{wide}."


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_state_reads_back_equal(stored, tmp_path, kind, group_bytes, monkeypatch):
    monkeypatch.setattr(restore_file, "GROUP_BYTES", group_bytes)
    export(stored, tmp_path / kind, whole_state=True)
    assert_equal(read(tmp_path / kind), dict(leaves_with_paths(run_state(20))), kind)


def test_dtypes_without_a_npy_name_become_float32():
    assert npy_dtype(np.dtype(ml_dtypes.bfloat16)) == npy_dtype(np.dtype(ml_dtypes.float8_e4m3fn)) == np.float32
    assert npy_dtype(np.dtype(np.float16)) == np.float16


# The target


@pytest.mark.parametrize("kind", KINDS)
def test_replaces_an_export_only_with_force(stored, original, tmp_path, kind):
    export(stored, tmp_path / kind)
    with pytest.raises(UserError, match=r"out\S* exists\. Choose another name, or give --force"):
        export(stored, tmp_path / kind)
    export(StoredCheckpoint(original / "checkpoints" / "30"), tmp_path / kind, force=True)
    assert_equal(read(tmp_path / kind), dict(leaves_with_paths(run_state(30).params)), kind)
    assert os.listdir(tmp_path) == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_leaves_nothing(run, tmp_path, kind):
    damage(run / "checkpoints" / "20", "flip")
    with pytest.raises(DamagedCheckpoint):
        export(StoredCheckpoint(run / "checkpoints" / "20"), tmp_path / kind, whole_state=True)
    assert [name for name in os.listdir(tmp_path) if name != "run"] == []


FULL = """
import resource, sys
from spmdkit.launch.cli import main
sys.dont_write_bytecode = True  # Python would keep a truncated .pyc of every module that it imports under the limit
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
sys.exit(main(["export", sys.argv[1], sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_ends_with_a_message_and_leaves_nothing(original, tmp_path, kind):
    command = [sys.executable, "-c", FULL, str(original), str(tmp_path / kind)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"error: {tmp_path / kind}")
    assert "larger than allowed (ulimit -f)" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_rejects_two_arrays_of_one_name(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(export_file, "own_name", lambda library, path: path.split("/")[-1])
    stored.arrays["params/other/norm"] = stored.arrays["params/norm"]
    with pytest.raises(UserError, match=r"Two arrays of .*/20 would have the name 'norm'\. Give --whole-state\."):
        export(stored, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rejects_invalid_targets(stored, tmp_path):
    with pytest.raises(UserError, match=r"ends in '\.pt': export writes \.safetensors, or a directory"):
        export(stored, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"The directory .*/no for model is missing"):
        export(stored, tmp_path / "no" / "model")
    with pytest.raises(UserError, match="--whole-state exports parameters and averages"):
        export(stored, tmp_path / "out", whole_state=True, ema=True)
    stored.arrays = {"step": stored.arrays["step"]}
    with pytest.raises(UserError, match=r"contains no parameters\. Give --whole-state"):
        export(stored, tmp_path / "out")


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/20", "checkpoints/20/out", "checkpoints/out"])
def test_force_never_replaces_a_run_or_its_checkpoints(name, stored, run):
    (run / "config.yaml").write_text("")
    (run / "metrics.jsonl").write_text("")
    refused = pytest.raises(UserError, match=r"is not an exported directory|is among the checkpoints of the run")
    with unchanged(run), refused:
        export(stored, run / name, force=True)


def test_force_never_replaces_other_files(stored, tmp_path):
    folder, file, link = tmp_path / "folder", tmp_path / "weights.safetensors", tmp_path / "link.safetensors"
    folder.mkdir()
    for target in (folder, file, link):
        if target is not folder:
            target.write_text("mine") if target is file else target.symlink_to(file)
        with pytest.raises(UserError, match=r"is not an exported|is a symbolic link"):
            export(stored, target, force=True)
    assert file.read_text() == "mine"
    folder.rmdir()
    export(stored, folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains other files as well: --force replaces only what an earlier export"):
        export(stored, folder, force=True)
    assert (folder / "notes.txt").read_text() == "mine"


# Low-rank adapters: merged as plain NumPy merges them, or beside what they adapt

SCALE = 1.5
RANDOM = np.random.default_rng(0)


def drawn(*shape, dtype=np.float32):
    return RANDOM.normal(size=shape).astype(dtype)


def factors(*shape):
    return {"a": drawn(*shape[:-1], 2), "b": drawn(*shape[:-2], 2, shape[-1])}


BLOCKS = {
    "blocks": {
        "up": drawn(3, 16, 8),
        "norm": drawn(3, 16),
        "inner": {"down": drawn(3, 8, 16, dtype=jnp.bfloat16)},
        "lora": {"up": factors(3, 16, 8), "inner": {"down": factors(3, 8, 16)}},
    },
    "head": {"out": drawn(16, 4)},
}
PLAIN = {"first": {"kernel": drawn(16, 8), "bias": drawn(8)}, "lora": {"first": {"kernel": factors(16, 8)}}}


def saved(folder, params, opt_state=None, **about):
    state = State(np.int32(4), params, opt_state or {"mu": params}, np.array([0, 1], np.uint32))
    run = write(folder / "run", state, about={**ABOUT, **about})
    return StoredCheckpoint(run / "checkpoints" / "4")


def product(pair):
    return SCALE * np.matmul(pair["a"].astype(np.float64), pair["b"].astype(np.float64))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("adapted"), BLOCKS, lora_scale=SCALE)


@pytest.mark.parametrize("kind", KINDS)
def test_merges_adapters_of_blocks(adapted, tmp_path, kind):
    export(adapted, tmp_path / kind)
    found, blocks = read(tmp_path / kind), BLOCKS["blocks"]
    adapters = blocks["lora"]
    expected = {
        "blocks/up": blocks["up"] + product(adapters["up"]),
        "blocks/norm": blocks["norm"],
        "blocks/inner/down": blocks["inner"]["down"].astype(np.float64) + product(adapters["inner"]["down"]),
    }
    assert found.keys() == {*expected, "head/out"}
    for path, leaf in expected.items():
        values = np.asarray(found[path], np.float64)
        np.testing.assert_allclose(values, leaf, rtol=1e-2 if "down" in path else 1e-5, atol=1e-6, err_msg=path)
        assert (found[path].dtype == jnp.bfloat16) == ("down" in path and kind == "out.safetensors")
    np.testing.assert_array_equal(found["head/out"], BLOCKS["head"]["out"])


def test_merges_adapters_of_other_models(tmp_path):
    export(saved(tmp_path, PLAIN, lora_scale=SCALE, library="flax.linen"), tmp_path / "out")
    found = read(tmp_path / "out")
    assert found.keys() == {"params/first/kernel", "params/first/bias"}
    expected = PLAIN["first"]["kernel"] + product(PLAIN["lora"]["first"]["kernel"])
    np.testing.assert_allclose(found["params/first/kernel"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"lora": "separate"}, {"whole_state": True}])
def test_keeps_adapters_separate(tmp_path, options):
    export(saved(tmp_path, PLAIN, lora_scale=SCALE), tmp_path / "out", **options)
    found, front = read(tmp_path / "out"), "params/" if "whole_state" in options else ""
    for path, leaf in leaves_with_paths(PLAIN):
        np.testing.assert_array_equal(found[f"{front}{path}"], leaf)


def test_rejects_adapters_without_a_scale(tmp_path):
    stored = saved(tmp_path, PLAIN)
    with pytest.raises(UserError, match=r"not the scale of their product.*Give --lora separate"):
        export(stored, tmp_path / "out")
    export(stored, tmp_path / "out", lora="separate")
    with pytest.raises(UserError, match="lora='apart': low-rank adapters are merged or separate"):
        export(stored, tmp_path / "other", lora="apart")


def test_keeps_parameters_named_like_adapters(tmp_path):
    export(saved(tmp_path, PLAIN, lora_scale=None), tmp_path / "out")
    assert "lora/first/kernel/a" in read(tmp_path / "out")


def test_merges_adapters_from_their_averages(tmp_path):
    pair = factors(16, 8)
    average = {"lora": {"first": {"kernel": pair}}}  # the rest was frozen
    stored = saved(tmp_path, PLAIN, {"average": average}, lora_scale=SCALE)
    export(stored, tmp_path / "merged", ema=True)
    found = read(tmp_path / "merged")
    expected = PLAIN["first"]["kernel"] + product(pair)
    np.testing.assert_allclose(found["first/kernel"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["first/bias"], PLAIN["first"]["bias"])
    with pytest.raises(CheckpointError, match="contains no averages"):
        export(saved(tmp_path / "other", PLAIN), tmp_path / "none", ema=True)
