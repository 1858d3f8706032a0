"""Folders of every family, against their own arithmetic in NumPy; and what is told of folders that do not fit."""

import json

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.mesh.errors import UserError
from spmdkit.models.catalog import initial_params, load_model, transformer_of
from spmdkit.models.hugging_face import load
from spmdkit.models.hugging_face.families import FAMILIES
from spmdkit.models.hugging_face.weights_reader import Stacked
from spmdkit.parallel import build_step, lay_out
from support import plain_families as plain

TOKENS = np.random.default_rng(5).integers(0, 37, (2, 21)).astype(np.int32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


@pytest.mark.slow_cases("biased", "gpt2", "llama", "llama3", "qwen2", "qwen3")
@pytest.mark.parametrize("name", plain.FAMILIES)
def test_logits_are_the_familys(folder, name, float64):
    config = plain.FAMILIES[name]
    arrays = plain.draw(config)
    plain.write(folder, config, arrays, files=1 if name in ("llama", "gpt2") else 3)
    loaded = load(folder)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), loaded.params)
    found = jax.jit(loaded.model.predict)(params, {"inputs": TOKENS})
    np.testing.assert_allclose(found, plain.logits(config, arrays, TOKENS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "head_width"), [("qwen3", 128), ("llama", 4), ("qwen2", 4)])
def test_a_missing_head_dim_has_the_default_of_its_family(family, head_width):
    """Qwen3 has heads of 128 whatever its width; the others divide the width among their heads."""
    config = {key: value for key, value in plain.QWEN3.items() if key != "head_dim"}
    config = FAMILIES[family].transformer({**config, "hidden_size": 16, "num_attention_heads": 4})
    assert config.head_width == head_width


@pytest.mark.parametrize(
    ("config", "key", "epsilon"),
    [
        *[(config, "rms_norm_eps", 1e-6) for config in (plain.LLAMA, plain.QWEN2, plain.QWEN3)],
        (plain.GPT2, "layer_norm_epsilon", 1e-5),
    ],
)
def test_a_missing_epsilon_is_that_of_transformers(config, key, epsilon):
    family = FAMILIES[config["model_type"]]
    assert family.transformer({**config, key: 0.25}).norm_epsilon == 0.25
    assert family.transformer({name: value for name, value in config.items() if name != key}).norm_epsilon == epsilon


@pytest.mark.parametrize(
    "place",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_scaling": {"rope_theta": 500.0}, "rope_parameters": {}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"type": "default"}},
    ],
)
def test_base_of_rotary_positions_has_several_places(place):
    config = {key: value for key, value in plain.LLAMA.items() if key != "rope_theta"}
    assert FAMILIES["llama"].transformer({**config, **place}).rope_base == 500


def test_rotary_positions_in_both_places_may_be_equal():
    rope = plain.LLAMA3["rope_scaling"]
    both = {**plain.LLAMA3, "rope_parameters": {**rope, "type": "llama3", "rope_theta": 500.0}}
    assert FAMILIES["llama"].transformer(both) == FAMILIES["llama"].transformer(plain.LLAMA3)


def test_nothing_is_read_before_it_is_asked_for(folder):
    plain.write(folder, plain.QWEN2, plain.draw(plain.QWEN2, "bfloat16"), files=2)
    params = load(folder).params
    assert isinstance(params["embed"]["tokens"], np.memmap)
    gate = params["blocks"]["mlp"]["gate"]
    assert not isinstance(gate, np.ndarray)
    assert (gate.shape, gate.dtype) == ((3, 16, 24), ml_dtypes.bfloat16)
    assert all(isinstance(array, np.memmap) for array in gate._arrays)


@pytest.mark.slow_cases("strategy0")
@pytest.mark.parametrize("strategy", [{"fsdp": 2, "tensor": 2, "data": 2}, {"pipe": 2, "fsdp": 4}])
def test_a_step_starts_from_the_weights(folder, strategy):
    """Two blocks on one stage and one on the other: a slot stays empty."""
    arrays = plain.draw(plain.QWEN3)
    sizes = {**plain.QWEN3, "vocab_size": 36}
    arrays = {name: array[:36] if array.shape[0] == 37 else array for name, array in arrays.items()}
    plain.write(folder, sizes, arrays)
    loaded = load(folder, length=16)
    strategy = {**strategy, "fsdp": {"size": strategy["fsdp"], "floor_bytes": 64}}
    step = build_step(loaded.model, optax.sgd(0.1), lay_out(loaded.model, strategy))
    state = step.init(0, loaded.params)
    np.testing.assert_array_equal(state.params["head"]["logits"], arrays["lm_head.weight"].T)
    np.testing.assert_array_equal(
        np.asarray(state.params["blocks"]["attention"]["query"])[0], arrays["model.layers.0.self_attn.q_proj.weight"].T
    )


def test_old_names_and_arrays_that_are_no_weights(folder):
    """A GPT-2 without its head has no prefix; its causal mask and a tied head may be stored too."""
    arrays = {name.removeprefix("transformer."): array for name, array in plain.draw(plain.GPT2).items()}
    mask = np.tri(32, dtype=np.float32)[None, None]
    arrays |= {"h.0.attn.bias": mask, "h.0.attn.masked_bias": np.float32(-1e4), "lm_head.weight": arrays["wte.weight"]}
    plain.write(folder, plain.GPT2, arrays)
    np.testing.assert_array_equal(load(folder).params["embed"]["positions"], arrays["wpe.weight"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_stored_rotary_frequencies_may_be_those_of_the_config(folder, dtype):
    frequencies = (500.0 ** -(np.arange(6) / 6)).astype(dtype)
    arrays = {**plain.draw(plain.LLAMA3), "model.layers.1.self_attn.rotary_emb.inv_freq": frequencies}
    plain.write(folder, plain.LLAMA3, arrays)
    assert load(folder).config.rope_base == 500


@pytest.mark.parametrize(
    ("config", "name", "array", "message"),
    [
        (
            plain.QWEN2,
            "lm_head.weight",
            np.ones((37, 16)),
            "lm_head.weight differs from the embedding table, but tie_wo",
        ),
        (plain.QWEN2, "lm_head.weight", np.ones((36, 16)), "lm_head.weight differs from the embedding table"),
        (plain.GPT2, "lm_head.weight", np.ones((37, 16)), r"tie_word_embeddings \(or its default\) is true"),
        (plain.GPT2, "transformer.h.2.attn.bias", np.ones((1, 1, 32, 32)), "h.2.attn.bias is not a causal mask"),
        (plain.GPT2, "transformer.h.2.attn.masked_bias", np.ones(()), r"masked_bias is 1.0, but masked positions"),
        (
            plain.LLAMA,
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            np.ones(2),
            "inv_freq differs from the rotary freq",
        ),
        (plain.LLAMA, "transformer.h.2.attn.bias", np.tri(32), "h.2.attn.bias is not an array of a llama"),
        (plain.LLAMA, "norm.weight", np.ones(16), "norm.weight is not an array of a llama"),
    ],
)
def test_rejects_arrays_that_contradict_the_transformer(folder, config, name, array, message):
    """Each would be left out, and the logits would be others than those of the program that wrote it."""
    plain.write(folder, config, {**plain.draw(config), name: array.astype(np.float32)})
    with pytest.raises(UserError, match=message):
        load(folder)


def test_compares_a_tied_head_row_by_row(folder):
    arrays = plain.draw(plain.QWEN2)
    head = arrays["model.embed_tokens.weight"].copy()
    head[36, 15] += 1
    plain.write(folder, plain.QWEN2, {**arrays, "lm_head.weight": head})
    with pytest.raises(UserError, match="differs from the embedding table"):
        load(folder)


def test_rejects_weights_that_are_integers(folder):
    arrays = plain.draw(plain.LLAMA)
    arrays["model.norm.weight"] = np.ones(16, np.int64)
    plain.write(folder, plain.LLAMA, arrays)
    with pytest.raises(UserError, match=r"model.norm.weight has the dtype int64; weights must have a float dtype"):
        load(folder)


def test_rejects_an_adapter_beside_the_weights(folder):
    plain.write(folder, plain.LLAMA, plain.draw(plain.LLAMA))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has an adapter \(adapter_config.json\).*Merge it"):
        load(folder)


def test_unknown_keys_without_effect_can_be_ignored(folder):
    plain.write(folder, {**plain.LLAMA, "recipe": "v2"}, plain.draw(plain.LLAMA))
    with pytest.raises(
        UserError, match=r"recipe is unknown and may change the logits, got 'v2'.*name it in ignore_keys"
    ):
        load(folder)
    assert load(folder, ignore_keys=["recipe"]).config == FAMILIES["llama"].transformer(plain.LLAMA)
    with pytest.raises(UserError, match=r"ignore_keys names 'recipes', which config.json does not have"):
        load(folder, ignore_keys=["recipe", "recipes"])


def test_keys_without_effect_may_have_any_value():
    """The keys of Qwen2.5, SmolLM2 and GPT-2 beside those that the transformer reads, and null."""
    described = {
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.1,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "initializer_range": 0.04,
        "is_llama_config": True,
        "max_window_layers": 21,
        "new_key": None,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "rope_scaling": None,
        "sliding_window": 131072,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4"},
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
    }
    assert FAMILIES["llama"].transformer({**plain.LLAMA, **described}) == FAMILIES["llama"].transformer(plain.LLAMA)
    of_gpt2 = {
        "n_ctx": 1024,
        "summary_type": "cls_index",
        "embd_pdrop": 0.1,
        "task_specific_params": {},
        "max_length": 5,
    }
    assert FAMILIES["gpt2"].transformer({**plain.GPT2, **of_gpt2}) == FAMILIES["gpt2"].transformer(plain.GPT2)


def test_reports_all_mismatches_at_once(folder):
    arrays = plain.draw(plain.LLAMA)
    del arrays["model.layers.2.mlp.up_proj.weight"]
    arrays["model.norm.weight"] = np.ones(15, np.float32)
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
    plain.write(folder, plain.LLAMA, arrays)
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(error.value).splitlines()[1:] == [
        "  model.layers.2.mlp.up_proj.weight is missing.",
        "  model.norm.weight is [15]; config.json requires [16].",
        "  model.layers.0.self_attn.q_proj.bias is not an array of a llama of these sizes.",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "lama"}, "unsupported model_type='lama'. Did you mean llama"),
        ({"model_type": None}, "Choose from llama, qwen2, qwen3, gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act: Input should be 'silu', got 'gelu'"),
        ({"hidden_size": None}, "hidden_size: Input should be a valid integer, got None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: .* got 'yarn'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.1: .* got 'sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: Input should be None"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window: Input should be False, got True"),
        ({"model_type": "gpt2"}, "n_embd: Field required"),
        ({**plain.GPT2, "activation_function": "relu"}, "activation_function: .*'gelu_new'.* got 'relu'"),
        ({**plain.GPT2, "scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx: Input should be False, got True"),
        ({"num_key_value_heads": 3}, "model.kv_heads=3 does not divide model.heads=4"),
        ({"hidden_size": [16]}, r"hidden_size: Input should be a valid integer, got \[16\]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater than or equal to 1, got 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: Input should be a valid number, got 'small'"),
        ({"rope_theta": float("nan")}, "rope_theta: Input should be less than 3"),
        ({"rope_scaling": [1]}, "rope_scaling: Input should be a valid dictionary"),
        ({"rope_scaling": {"type": "linear"}}, "rotary positions of type 'linear' need factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position_embeddings, got"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor: Input should be"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            r"rope_scaling=\{.*'factor': 2.0\} contradicts rope_parameters=\{.*'factor': 4.0\}",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 500.0}},
            "rope_scaling=.* contradicts rope_parameters=.* programs differ",
        ),
        ({"rope_parameters": {"rope_theta": 9.0}}, r"rope_theta=500.0 contradicts rope_parameters.rope_theta=9.0"),
        ({"rope_parameters": {"rope_theta": None}}, r"rope_parameters.rope_theta must not be null"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default"}},
            "rope_scaling.rope_type='default' contradicts rope_scaling.type='linear'",
        ),
        (
            {"rope_scaling": {"factor": 2.0}},
            "rope_scaling.factor=2.0 is not used by rotary positions of type 'default'",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor: .* got 0.5"),
        ({"rope_scaling": {"attention_factor": 0.5}}, "rope_scaling.attention_factor is not supported, got 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is not supported"),
        ({"original_max_position_embeddings": 16}, "original_max_position_embeddings=16 is only used by"),
        (
            {**plain.LLAMA3, "original_max_position_embeddings": 16},
            "embeddings=16 contradicts rope_scaling.original_max_position_embeddings=32",
        ),
        ({"rope_thetta": 3.0}, "rope_thetta is unknown and may change the logits, got 3.0. Did you mean rope_theta"),
        ({"is_causal": False}, "is_causal: Input should be True, got False"),
        ({"per_layer_config": {"1": {}}}, "per_layer_config: Input should be None"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads: .* at most 0 items"),
        ({"auto_map": {}}, "auto_map is unknown"),
        *[({key: None}, f"{key} must not be null") for key in ("hidden_act", "tie_word_embeddings", "rms_norm_eps")],
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias=True is not supported for model_type='qwen2'"),
        ({**plain.GPT2, "num_hidden_layers": 2}, "num_hidden_layers is unknown and may change"),
        ({**plain.GPT2, "scale_attn_weights": None}, "scale_attn_weights must not be null"),
    ],
)
def test_rejects_unsupported_configs(folder, changed, message):
    plain.write(folder, {**plain.LLAMA, **changed}, {})
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *[("config.json", content, "cannot be read") for content in ("[" * 100_000, "{")],
        *[("config.json", content, "must be a JSON object") for content in ("3", "null")],
        ("model.safetensors.index.json", "[]", "must be a JSON object"),
        ("model.safetensors.index.json", '{"weight_map": []}', "weight_map must map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "weight_map must map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}', "weight_map must map"),
    ],
)
def test_rejects_other_json(file, content, message, folder):
    plain.write(folder, plain.LLAMA, plain.draw(plain.LLAMA), files=2)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=rf"{file}:? {message}"):
        load(folder)


def test_a_name_on_the_hub_is_explained():
    with pytest.raises(UserError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B"):
        load("Qwen/Qwen3-0.6B")


def test_rejects_invalid_directories(folder, tmp_path):
    with pytest.raises(UserError, match=r"the directory does not exist. Give a directory"):
        load(folder)
    folder.mkdir()
    with pytest.raises(UserError, match=r"config.json is missing"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(plain.LLAMA))
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"neither model.safetensors nor .* \(pytorch_model.bin does"):
        load(folder)


def test_rejects_invalid_indexes(folder):
    plain.write(folder, plain.LLAMA, plain.draw(plain.LLAMA), files=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    before = dict(index["weight_map"])
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"maps .* to model-00001-of-00002.safetensors, which does not"):
        load(folder)
    (folder / "model.safetensors").write_bytes(plain.file_of({}))
    index["weight_map"] = {name: file for name, file in before.items() if name != "model.norm.weight"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"contains both model.safetensors and model.safetensors.index.json"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"contains model.norm.weight, which .*index.json does not map to it"):
        load(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"names missing files: model-00002-of-00002.safetensors"):
        load(folder)


WHOLE = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


class Recorded:
    """An array that remembers what was read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, []

    def __getitem__(self, index):
        self.read.append(index)
        return self.array[index]


@pytest.mark.parametrize(
    "index",
    [
        np.s_[:],
        np.s_[1:3, 2:4],
        np.s_[:, :, 3:],
        np.s_[2],
        np.s_[-1, 0],
        np.s_[::2, :, 0],
        (np.array([3, 0, 0]), slice(1, 2), slice(None)),
        np.s_[2:2, :3],
    ],
)
def test_indices_are_numpys(index):
    found = Stacked(list(WHOLE))[index]
    np.testing.assert_array_equal(found, WHOLE[index])
    assert found.dtype == np.float32


def test_as_an_array():
    stacked = Stacked(list(WHOLE))
    assert (stacked.shape, stacked.ndim, len(stacked)) == ((4, 6, 8), 3, 4)
    np.testing.assert_array_equal(np.asarray(stacked), WHOLE)
    assert np.asarray(stacked, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="need a copy"):
        np.asarray(stacked, copy=False)


@pytest.mark.parametrize("other", [WHOLE[0].astype(np.float16), WHOLE[0, :3]])
def test_blocks_must_be_alike(other):
    with pytest.raises(ValueError, match=r"Block 1 is float\d+\[\d, 8\], but block 0 float32\[6, 8\]"):
        Stacked([WHOLE[0], other])


def test_every_device_reads_its_own_part():
    parts = [Recorded(array) for array in WHOLE]
    mesh = DeviceMesh.of(fsdp=2, pipe=2, devices=[f"cpu:{n}" for n in range(4)]).backend_mesh
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("pipe", None, "fsdp"))
    stacked = Stacked(parts)
    array = jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])
    np.testing.assert_array_equal(array, WHOLE)
    for part in parts:
        read = sum(WHOLE[0][index].size for index in part.read)
        assert read == part.array.size  # each half once, by the two devices of its stage
        assert len(part.read) == 2


def test_blocks_that_differ():
    with pytest.raises(UserError, match=r"Block 1 is float32\[6, 7\], but block 0 float32\[6, 8\]"):
        Stacked([WHOLE[0], WHOLE[0][:, :7]])


@pytest.fixture
def spec(tmp_path):
    plain.write(tmp_path / "models", plain.GPT2, plain.draw(plain.GPT2))
    return {"name": "hugging_face", "check": "error", "folder": "models"}


def test_sizes_and_weights_below_the_search_path(spec, tmp_path):
    model = load_model(spec, vocabulary=30, length=16, search_path=[tmp_path / "no", tmp_path])
    assert (model.num_blocks, model.init.__self__.config.length, model.init.__self__.config.vocabulary) == (3, 16, 37)
    params = initial_params(spec, model, [tmp_path])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    np.testing.assert_array_equal(params["embed"]["tokens"], plain.draw(plain.GPT2)["transformer.wte.weight"])


def test_adapters_of_weights_are_drawn_from_the_seed(spec, tmp_path):
    spec["lora"] = {"rank": 2, "match": ["blocks/mlp/up"]}
    model = load_model(spec, vocabulary=30, length=16, search_path=[tmp_path])
    drawn = [initial_params(spec, model, [tmp_path], seed=seed)["blocks"]["lora"]["mlp"]["up"]["a"] for seed in (0, 1)]
    assert (drawn[0] != drawn[1]).all()


def test_the_config_of_a_run_names_keys_to_ignore(spec, tmp_path):
    plain.write(tmp_path / "models", {**plain.GPT2, "recipe": 2}, plain.draw(plain.GPT2))
    with pytest.raises(UserError, match=r"name it in ignore_keys \(model.ignore_keys\)"):
        load_model(spec, vocabulary=30, length=16, search_path=[tmp_path])
    ignoring = {**spec, "ignore_keys": ["recipe"]}
    model = load_model(ignoring, vocabulary=30, length=16, search_path=[tmp_path])
    assert initial_params(ignoring, model, [tmp_path]) is not None
    assert transformer_of(ignoring, {"length": 16}, [tmp_path])[0].layers == 3


def test_sizes_alone(spec, tmp_path):
    (tmp_path / "models/model.safetensors").unlink()
    own = {**spec, "weights": False, "folder": str(tmp_path / "models"), "dropout": 0.1}
    model = load_model(own, vocabulary=30, length=16)
    assert model.init.__self__.config.dropout == 0.1
    assert initial_params(own, model) is None
    assert initial_params({"name": "transformer"}, model) is None


def test_mistakes_are_told_before_anything_is_compiled(spec, tmp_path):
    with pytest.raises(UserError, match=r"model.folder is missing"):
        load_model({"name": "hugging_face"}, vocabulary=30, length=16)
    with pytest.raises(UserError, match=r"The data has 256 tokens, but model.folder=.*models 37"):
        load_model(spec, vocabulary=256, length=16, search_path=[tmp_path])
    with pytest.raises(UserError, match=r"model.max_length=32 is less than the 64 positions"):
        load_model(spec, vocabulary=30, length=64, search_path=[tmp_path])
    (tmp_path / "models/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        load_model(spec, vocabulary=30, length=16, search_path=[tmp_path])
    with pytest.raises(UserError, match="nowhere: the directory does not exist"):
        load_model({**spec, "folder": "nowhere"}, vocabulary=30, length=16, search_path=[tmp_path])
