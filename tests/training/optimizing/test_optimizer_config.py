import pytest
from spmdkit.training.optimizing.averaging import EMAConfig
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamW"}, "optimizer.name='adamW' is not an optimizer. Did you mean adamw"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0.0 must be positive in float32."),
        ({"learning_rate": INF}, "optimizer.learning_rate=inf must be a finite number."),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1 must be at least 0."),
        ({"epsilon": 1e-320}, "optimizer.epsilon=1e-320 must be positive in float32."),
        ({"betas": (NAN, 0.9)}, r"optimizer.betas\[0\]=nan must be a finite number."),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas\[1\]=1.0 must be less than 1."),
        ({"name": "sgd", "momentum": 1.5}, "optimizer.momentum=1.5 must be less than 1."),
        ({"decay_skip": ("(",)}, r"optimizer.decay_skip: '\('"),
        ({"momentum": 0.9}, "optimizer.momentum: adamw does not use it"),
        ({"name": "adam", "weight_decay": 0.1}, "weight_decay: adam does not use it. Use optimizer.name=adamw"),
        ({"options": {"b1": 0.8}}, "optimizer.options: adamw does not use it"),
        ({"name": "optax:adam", "weight_decay": 0.1}, "optimizer.weight_decay: .* Set it in optimizer.options"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_rejects_an_average_without_decay():
    with pytest.raises(ValueError, match=r"optimizer.ema.decay=1.0 must be less than 1."):
        EMAConfig(decay=1.0)
    with pytest.raises(ValueError, match=r"optimizer.ema.evaluate=true requires an average"):
        EMAConfig(evaluate=True)


def test_reports_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        OptimizerConfig(learning_rate=-1.0, momentum=0.5, schedule={"name": "x"})
    keys = [line.split("=")[0].split(":")[0].split(" ")[0] for line in str(error.value).splitlines()]
    assert keys == ["optimizer.momentum", "optimizer.learning_rate", "optimizer.schedule.name"]
