"""The families against `transformers` itself, where it and torch are installed: `pip install torch transformers`."""

import re

import jax
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.hugging_face import load, save
from spmdkit.models.hugging_face.families import FAMILIES
from spmdkit.models.hugging_face.keys_without_effect import has_no_effect
from support import plain_families as plain

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]
TOKENS = np.random.default_rng(5).integers(0, 37, (2, 21)).astype(np.int32)


@pytest.fixture
def libraries():
    missing = "no torch or transformers: `make test-libraries` installs them"
    return tuple(pytest.importorskip(name, reason=missing) for name in ("torch", "transformers"))


def random_model(libraries, name):
    """A model of `transformers` with random weights, biases and norms."""
    torch, transformers = libraries
    config = dict(plain.FAMILIES[name])
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1) * 0.5)
    return model


def logits_of(libraries, model):
    torch, _ = libraries
    with torch.no_grad():
        return model(torch.as_tensor(TOKENS, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("name", plain.FAMILIES)
def test_logits_and_the_way_back(libraries, tmp_path, name):
    torch, transformers = libraries
    theirs = random_model(libraries, name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    loaded = load(tmp_path / "theirs")
    params = jax.tree.map(np.asarray, loaded.params)
    found, expected = jax.jit(loaded.model.predict)(params, {"inputs": TOKENS}), logits_of(libraries, theirs)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)

    save(tmp_path / "ours", loaded.config, loaded.params, like=tmp_path / "theirs")
    save(tmp_path / "bare", loaded.config, loaded.params)
    for folder in ("ours", "bare"):
        again, told = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        weights, those = again.state_dict(), theirs.state_dict()
        assert set(weights) == set(those)
        assert all(torch.equal(weights[each], those[each]) for each in those)
        np.testing.assert_array_equal(logits_of(libraries, again.eval()), expected)


def test_bfloat16(libraries, tmp_path):
    """Weights of the usual dtype, computed in float32 on both sides."""
    torch, transformers = libraries
    random_model(libraries, "qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    loaded = load(tmp_path / "theirs")
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), loaded.params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    found = jax.jit(loaded.model.predict)(params, {"inputs": TOKENS})
    np.testing.assert_allclose(found, logits_of(libraries, theirs), atol=1e-4, rtol=1e-4)


LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = plain.LLAMA3["rope_scaling"]
FULL = ["full_attention"] * 3
HEAD = {"lm_head.weight": np.random.default_rng(1).normal(size=(37, 16)).astype(np.float32)}
SAME = ""
VARIANTS = [
    # family, changed keys, further arrays, a name in the error, or SAME
    ("qwen2", {}, HEAD, "lm_head.weight"),
    ("gpt2", {}, HEAD, "lm_head.weight"),
    ("gpt2", {"tie_word_embeddings": False}, HEAD, SAME),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": LINEAR}, {}, "rope_scaling"),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 500.0}}, {}, "rope_parameters"),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": LINEAR}, {}, SAME),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {}}, {}, SAME),
    ("llama", {"rope_scaling": {}, "rope_parameters": LINEAR}, {}, SAME),
    ("llama", {"rope_parameters": {"rope_theta": 100.0}}, {}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, {}, "rope_theta"),
    ("llama", {"rope_theta": None}, {}, "rope_theta"),
    ("llama", {"rope_scaling": {**LINEAR, "type": "default"}}, {}, "rope_type"),
    ("llama", {"rope_scaling": {"factor": 4.0}}, {}, "rope_scaling.factor"),
    ("llama", {"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}}, {}, "partial_rotary_factor"),
    ("llama", {"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": {**LINEAR, "attention_factor": 2.0}}, {}, "attention_factor"),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}, {}, "original_max_position_embeddings"),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32}, {}, SAME),
    ("qwen2", {"rope_parameters": {"full_attention": LINEAR}, "layer_types": FULL}, {}, "rope_parameters"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, {}, "use_sliding_window"),
    ("qwen2", {"sliding_window": 4, "layer_types": FULL}, {}, SAME),
    ("llama", {"sliding_window": 4}, {}, SAME),
    ("llama", {"is_causal": False}, {}, "is_causal"),
    ("gpt2", {"is_causal": False}, {}, "is_causal"),
    ("llama", {"is_causal": None}, {}, SAME),
    ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, {}, "per_layer_config"),
    ("llama", {"head_dim": None, "rope_scaling": None, "quantization_config": None}, {}, SAME),
    ("llama", {"hidden_act": None}, {}, "hidden_act"),
    ("llama", {"rms_norm_eps": None}, {}, "rms_norm_eps"),
    ("llama", {"tie_word_embeddings": None}, {}, "tie_word_embeddings"),
    ("gpt2", {"tie_word_embeddings": None}, {}, "tie_word_embeddings"),
    ("gpt2", {"scale_attn_weights": None}, {}, "scale_attn_weights"),
    ("gpt2", {"num_hidden_layers": 2}, {}, "num_hidden_layers"),
    ("gpt2", {"reorder_and_upcast_attn": True, "n_inner": None}, {}, SAME),
    ("qwen2", {"attention_bias": False}, {}, SAME),
    ("qwen3", {"mlp_bias": True}, {}, "mlp_bias"),
    ("llama", {"attention_dropout": 0.5, "pretraining_tp": 2, "chunk_size_feed_forward": 1}, {}, SAME),
    ("gpt2", {"resid_pdrop": 0.5, "n_ctx": 7, "summary_type": "mean", "max_length": 3}, {}, SAME),
]


@pytest.mark.parametrize(("family", "changed", "arrays", "refused"), VARIANTS)
def test_a_folder_is_refused_or_has_their_logits(libraries, tmp_path, family, changed, arrays, refused):
    torch, transformers = libraries
    config = {**plain.FAMILIES[family], **changed}
    plain.write(tmp_path / "folder", config, {**plain.draw(plain.FAMILIES[family]), **arrays})
    if refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            load(tmp_path / "folder")
        return
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    loaded = load(tmp_path / "folder")
    params = jax.tree.map(np.asarray, loaded.params)
    predicted = jax.jit(loaded.model.predict)(params, {"inputs": TOKENS})
    np.testing.assert_allclose(predicted, logits_of(libraries, theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_their_config_is_known(libraries, family):
    """A key that a new version adds is an error, until it is read, or is known to have no effect."""
    _, transformers = libraries
    content = transformers.AutoConfig.for_model(family).to_dict()
    known = FAMILIES[family].fields.keys()
    assert [key for key in content if key not in known and not has_no_effect(key)] == []


@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype"])
def test_files_of_float32_stay_float32(libraries, tmp_path, dtype):
    torch, transformers = libraries
    plain.write(tmp_path / "first", {**plain.LLAMA, dtype: "bfloat16"}, plain.draw(plain.LLAMA))
    loaded = load(tmp_path / "first")
    save(tmp_path / "second", loaded.config, loaded.params, like=tmp_path / "first")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert again.dtype == torch.float32
