"""The families against `transformers` itself, where it and torch are installed: `pip install torch transformers`."""

import jax
import numpy as np
import pytest
from spmdkit.models.hugging_face import load, save
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
