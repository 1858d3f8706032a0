"""What a model takes, as the config and the data say; what neither says is not limited."""

import pytest
from runs import write_config
from spmdkit.configs import load_config
from spmdkit.data.ranges import Limit, Limits
from spmdkit.launch.run.guarding.limits import model_limits

CLASSES = Limit("model.classes", 10)
OF_MODEL, OF_DATA = Limit("model.vocabulary", 300), Limit("vocabulary", 256)


@pytest.mark.parametrize(
    ("model", "vocabulary", "limits"),
    [
        ({"name": "mlp", "classes": 10, "widths": [8]}, None, Limits(targets=CLASSES)),
        ({"name": "transformer", "vocabulary": 300}, None, Limits(inputs=OF_MODEL, targets=OF_MODEL)),
        ({"name": "transformer", "vocabulary": 300}, 256, Limits(inputs=OF_DATA, targets=OF_DATA)),
        ({"name": "transformer"}, None, Limits()),
        ({"name": "mine:model", "vocabulary": 300}, None, Limits(inputs=OF_MODEL)),
        ({"name": "mine:model"}, 256, Limits(inputs=OF_DATA)),
        ({"name": "mine:model"}, None, Limits()),
    ],
)
def test_what_is_known_of_a_model(model, vocabulary, limits, tmp_path):
    config = load_config(write_config(tmp_path, model=model))
    assert model_limits(config, vocabulary) == limits
