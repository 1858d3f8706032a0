"""What is written reads back bit for bit, by the format's specification and by the family's own arithmetic."""

import json

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.keys import make_key
from spmdkit.models.hugging_face import load, save
from spmdkit.models.hugging_face.families import family_of
from spmdkit.models.hugging_face.weights_writer import _split
from spmdkit.models.moe import MoEConfig
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import build_step, lay_out
from support import plain_families as plain
from support import toy

GPT2 = {"norm": "layer", "positions": "learned", "mlp": "gelu", "mlp_bias": True, "attention_bias": "all"}


def read_all(folder):
    """Arrays by name, of all files of a folder, by the specification alone."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        described = json.loads(content[8 : 8 + length])
        assert described.pop("__metadata__")["format"] == "pt"
        for name, each in described.items():
            data = content[8 + length :][slice(*each["data_offsets"])]
            dtype = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}[each["dtype"]]
            found[name] = np.frombuffer(data, dtype).reshape(each["shape"])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", plain.FAMILIES)
def test_there_and_back(tmp_path, name, dtype):
    config = plain.FAMILIES[name]
    arrays = plain.draw(config, dtype)
    plain.write(tmp_path / "first", config, arrays)
    first = load(tmp_path / "first")
    save(tmp_path / "second", first.config, first.params, max_file_bytes=8000)
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1
    found = read_all(tmp_path / "second")
    assert set(found) == set(arrays)
    for each, array in arrays.items():
        assert found[each].dtype == array.dtype
        np.testing.assert_array_equal(found[each], array)
    second = load(tmp_path / "second")
    assert second.config == first.config
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, each.params) for each in (first, second)))
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_may_have_exactly_the_maximum_size():
    assert _split({"a": 5, "b": 5, "c": 11, "d": 1}, 10) == [["a", "b"], ["c"], ["d"]]


def test_arrays_of_devices_in_another_dtype(tmp_path):
    arrays = plain.draw(plain.QWEN2)
    plain.write(tmp_path / "first", plain.QWEN2, arrays)
    loaded = load(tmp_path / "first")
    params = jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf)), loaded.params)
    save(tmp_path / "second", loaded.config, params, dtype="bfloat16")
    found = read_all(tmp_path / "second")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array.astype(ml_dtypes.bfloat16))
    assert json.loads((tmp_path / "second/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"schedule": "zbv"}, {"schedule": "1f1b", "layers": [3, 1]}])
def test_the_state_of_a_pipeline_is_written_in_the_order_of_the_model(tmp_path, options):
    config = TransformerConfig(vocabulary=32, length=8, layers=4, width=16, heads=2, mlp_width=24)
    model = transformer(config)
    pipe = {"size": 2, "microbatches": 2, **options}
    step = build_step(model, optax.sgd(0.1), lay_out(model, {"pipe": pipe}, devices=toy.devices(2)))
    save(tmp_path / "written", config, step.init(0))
    expected = jax.jit(model.init)(make_key(0))
    written = jax.tree.map(np.asarray, load(tmp_path / "written").params)
    jax.tree.map(np.testing.assert_array_equal, written, jax.tree.map(np.asarray, expected))


def test_what_stands_beside_the_weights(tmp_path):
    plain.write(
        tmp_path / "first", {**plain.LLAMA, "bos_token_id": 7, "torch_dtype": "float32"}, plain.draw(plain.LLAMA)
    )
    for name in ("tokenizer.json", "chat_template.jinja", "added_tokens.json"):
        (tmp_path / "first" / name).write_text("{}")
    loaded = load(tmp_path / "first")
    save(tmp_path / "second", loaded.config, loaded.params, dtype="bfloat16", like=tmp_path / "first")
    content = json.loads((tmp_path / "second/config.json").read_text())
    assert (content["bos_token_id"], content["torch_dtype"]) == (7, "bfloat16")
    for name in ("tokenizer.json", "chat_template.jinja", "added_tokens.json"):
        assert (tmp_path / "second" / name).read_text() == "{}"


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "contradicting",
    [
        {"rope_scaling": LINEAR},
        {"rope_parameters": {**LINEAR, "rope_theta": 500.0}},
        {"head_dim": 8},
        {"layer_types": ["full_attention"] * 2},
        {"use_sliding_window": True, "sliding_window": 2},
        {"quantization_config": {"quant_method": "gptq"}},
        {"hidden_act": "gelu"},
        {"is_causal": False},
        {"auto_map": {"AutoModelForCausalLM": "other.Model"}},
        plain.GPT2,
    ],
)
def test_keys_of_another_folder_do_not_survive(tmp_path, contradicting):
    """What is written loads as the transformer that was given, whatever `like` says."""
    plain.write(tmp_path / "first", plain.LLAMA, plain.draw(plain.LLAMA))
    plain.write(tmp_path / "like", {**plain.LLAMA, "bos_token_id": 7, **contradicting}, {})
    loaded = load(tmp_path / "first")
    save(tmp_path / "second", loaded.config, loaded.params, like=tmp_path / "like")
    save(tmp_path / "bare", loaded.config, loaded.params)
    written = json.loads((tmp_path / "second/config.json").read_text())
    assert written.pop("bos_token_id") == 7
    assert written == json.loads((tmp_path / "bare/config.json").read_text())
    assert load(tmp_path / "second").config == loaded.config


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_that_of_the_files(tmp_path, key):
    """`transformers` would round float32 files if a dtype of `like` stayed."""
    plain.write(tmp_path / "first", {**plain.LLAMA, key: "bfloat16"}, plain.draw(plain.LLAMA))
    loaded = load(tmp_path / "first")
    save(tmp_path / "second", loaded.config, loaded.params, like=tmp_path / "first")
    content = json.loads((tmp_path / "second/config.json").read_text())
    assert (content.get("dtype"), content["torch_dtype"]) == (None, "float32")


def test_the_longest_row_stays_after_training_on_shorter_rows(tmp_path):
    plain.write(tmp_path / "first", plain.LLAMA, plain.draw(plain.LLAMA))
    loaded = load(tmp_path / "first", length=16)
    assert loaded.config.length == 16
    save(tmp_path / "second", loaded.config, loaded.params)
    assert json.loads((tmp_path / "second/config.json").read_text())["max_position_embeddings"] == 64


def test_a_qwen2_has_no_options_of_biases(tmp_path):
    plain.write(tmp_path / "first", plain.QWEN2, plain.draw(plain.QWEN2))
    loaded = load(tmp_path / "first")
    save(tmp_path / "second", loaded.config, loaded.params)
    assert not {"attention_bias", "mlp_bias"} & json.loads((tmp_path / "second/config.json").read_text()).keys()


def test_rejects_parameters_that_do_not_match(tmp_path):
    plain.write(tmp_path / "first", plain.LLAMA, plain.draw(plain.LLAMA))
    loaded = load(tmp_path / "first")
    params = {**loaded.params, "head": {"norm": np.ones(15), "scale": np.ones(3)}}
    with pytest.raises(UserError) as error:
        save(tmp_path / "second", loaded.config, params)
    assert "head/norm is [15]; the model's is [16]." in str(error.value)
    assert "head/logits is missing" in str(error.value)
    assert "head/scale is [3]; the model's is missing." in str(error.value)
    with pytest.raises(UserError, match="already exists"):
        save(tmp_path / "first", loaded.config, loaded.params)
    assert not (tmp_path / "second").exists()


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    plain.write(tmp_path / "first", plain.LLAMA, plain.draw(plain.LLAMA))
    loaded = load(tmp_path / "first")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spmdkit.models.hugging_face.weights_writer.write_arrays", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "second", loaded.config, loaded.params)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("options", "family"),
    [
        ({}, "llama"),
        ({"attention_bias": "all"}, "llama"),
        ({"attention_bias": "inputs"}, "qwen2"),
        ({"head_norm": True}, "qwen3"),
        (GPT2, "gpt2"),
    ],
)
def test_the_family_of_an_arrangement(options, family):
    assert family_of(TransformerConfig(vocabulary=8, length=8, **options)).model_type == family


def test_an_arrangement_of_no_family():
    with pytest.raises(UserError) as error:
        family_of(TransformerConfig(vocabulary=8, length=8, norm="layer"))
    assert "llama: model.norm=layer (rms)" in str(error.value)
    assert "gpt2: model.positions=rotary (learned)" in str(error.value)
    for other in ({"head_width": 32}, {"kv_heads": 2}):
        with pytest.raises(UserError, match=r"gpt2: model\.kv_heads and model\.head_width \(they must follow"):
            family_of(TransformerConfig(vocabulary=8, length=8, width=64, heads=4, **GPT2, **other))
    with pytest.raises(UserError, match="A mixture of experts"):
        family_of(MoEConfig(vocabulary=8, length=8))
