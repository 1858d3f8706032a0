"""`model: {name: hugging_face, folder: ...}`: sizes and first parameters are the folder's."""

import jax
import numpy as np
import plain_families as plain
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.catalog import initial_params, load_model


@pytest.fixture
def spec(tmp_path):
    plain.write(tmp_path / "models", plain.GPT2, plain.draw(plain.GPT2))
    return {"name": "hugging_face", "check": "error", "folder": "models"}


def test_sizes_and_weights_below_the_search_path(spec, tmp_path):
    model = load_model(spec, vocabulary=30, length=16, search_path=[tmp_path / "no", tmp_path])
    assert (model.num_blocks, model.init.args[0].length, model.init.args[0].vocabulary) == (3, 16, 37)
    params = initial_params(spec, model, [tmp_path])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    np.testing.assert_array_equal(params["embed"]["tokens"], plain.draw(plain.GPT2)["transformer.wte.weight"])


def test_sizes_alone(spec, tmp_path):
    (tmp_path / "models/model.safetensors").unlink()
    own = {**spec, "weights": False, "folder": str(tmp_path / "models"), "dropout": 0.1}
    model = load_model(own, vocabulary=30, length=16)
    assert model.init.args[0].dropout == 0.1
    assert initial_params(own, model) is None
    assert initial_params({"name": "transformer"}, model) is None


def test_mistakes_are_told_before_anything_is_compiled(spec, tmp_path):
    with pytest.raises(UserError, match=r"model.folder is not given"):
        load_model({"name": "hugging_face"}, vocabulary=30, length=16)
    with pytest.raises(UserError, match=r"The data has 256 tokens and model.folder=.*models 37"):
        load_model(spec, vocabulary=256, length=16, search_path=[tmp_path])
    with pytest.raises(UserError, match=r"model.max_length=32 is less than the 64 positions"):
        load_model(spec, vocabulary=30, length=64, search_path=[tmp_path])
    (tmp_path / "models/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        load_model(spec, vocabulary=30, length=16, search_path=[tmp_path])
    with pytest.raises(UserError, match=r"model.folder=nowhere is no folder"):
        load_model({**spec, "folder": "nowhere"}, vocabulary=30, length=16, search_path=[tmp_path])
