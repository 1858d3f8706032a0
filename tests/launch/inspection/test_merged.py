"""Low-rank adapters in what is exported: merged as plain NumPy merges them, or beside what they adapt."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_checkpoints import ABOUT, State, write
from spmdkit.launch.inspection import stored as stored_file
from spmdkit.launch.inspection.export import export
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.mesh.errors import UserError

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
WRAPPED = {"base": [drawn(16, 8), drawn(8)], "lora": {"0": factors(16, 8)}}


def saved(folder, params, **about):
    state = State(np.int32(4), params, {"mu": params}, np.array([0, 1], np.uint32))
    run = write(folder / "run", state, about={**ABOUT, **about})
    return StoredCheckpoint(run / "checkpoints" / "4")


def product(pair):
    return SCALE * np.matmul(pair["a"].astype(np.float64), pair["b"].astype(np.float64))


def read(folder):
    return {path.relative_to(folder).with_suffix("").as_posix(): np.load(path) for path in folder.rglob("*.npy")}


@pytest.mark.parametrize("unstack", [False, True])
def test_blocks(tmp_path, unstack, monkeypatch):
    monkeypatch.setattr(stored_file, "PART_BYTES", 1)  # as many parts as there are chunks
    stored = saved(tmp_path, BLOCKS, lora_scale=SCALE)
    export(stored, tmp_path / "out", unstack=unstack)
    found, blocks = read(tmp_path / "out"), BLOCKS["blocks"]
    adapters = blocks["lora"]
    expected = {
        "blocks/up": blocks["up"] + product(adapters["up"]),
        "blocks/norm": blocks["norm"],
        "blocks/inner/down": blocks["inner"]["down"].astype(np.float64) + product(adapters["inner"]["down"]),
    }
    if unstack:
        expected = {path.replace("/", f"/{n}/", 1): leaf[n] for path, leaf in expected.items() for n in range(3)}
    assert found.keys() == {*expected, "head/out"}
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-2 if "down" in path else 1e-5, atol=1e-6, err_msg=path)
    np.testing.assert_array_equal(found["head/out"], BLOCKS["head"]["out"])


def test_the_same_in_safetensors(tmp_path):
    from safetensors.numpy import load_file

    export(saved(tmp_path, BLOCKS, lora_scale=SCALE), tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    expected = BLOCKS["blocks"]["up"] + product(BLOCKS["blocks"]["lora"]["up"])
    np.testing.assert_allclose(found["blocks/up"], expected, rtol=1e-5, atol=1e-6)
    assert found["blocks/inner/down"].dtype == jnp.bfloat16


def test_a_model_without_groups(tmp_path):
    export(saved(tmp_path, PLAIN, lora_scale=SCALE, library="flax.linen"), tmp_path / "out")
    found = read(tmp_path / "out")
    assert found.keys() == {"params/first/kernel", "params/first/bias"}
    expected = PLAIN["first"]["kernel"] + product(PLAIN["lora"]["first"]["kernel"])
    np.testing.assert_allclose(found["params/first/kernel"], expected, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_no_dict(tmp_path):
    export(saved(tmp_path, WRAPPED, lora_scale=SCALE), tmp_path / "out")
    found = read(tmp_path / "out")
    assert found.keys() == {"0", "1"}
    np.testing.assert_allclose(found["0"], WRAPPED["base"][0] + product(WRAPPED["lora"]["0"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"lora": "separate"}, {"whole_state": True}])
def test_separate(tmp_path, options):
    export(saved(tmp_path, PLAIN, lora_scale=SCALE), tmp_path / "out", **options)
    found, front = read(tmp_path / "out"), "params/" if "whole_state" in options else ""
    for path, leaf in leaves_with_paths(PLAIN):
        np.testing.assert_array_equal(found[f"{front}{path}"], leaf)


def test_a_checkpoint_that_does_not_say_the_scale(tmp_path):
    stored = saved(tmp_path, PLAIN)
    with pytest.raises(UserError, match=r"not what their product is multiplied by.*Give --lora separate"):
        export(stored, tmp_path / "out")
    export(stored, tmp_path / "out", lora="separate")
    with pytest.raises(UserError, match="lora='apart': low-rank adapters are merged or separate"):
        export(stored, tmp_path / "other", lora="apart")


def test_a_models_own_parameters_of_that_name_stay(tmp_path):
    export(saved(tmp_path, PLAIN, lora_scale=None), tmp_path / "out")
    assert "lora/first/kernel/a" in read(tmp_path / "out")
