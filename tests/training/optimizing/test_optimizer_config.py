import pytest
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamW"}, "optimizer.name='adamW' is not an optimizer. Did you mean adamw"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0.0 has to be over 0"),
        ({"learning_rate": NAN}, "optimizer.learning_rate=nan has to be over 0, and finite"),
        ({"learning_rate": INF}, "optimizer.learning_rate=inf has to be over 0, and finite"),
        ({"weight_decay": NAN}, "optimizer.weight_decay=nan has to be at least 0, and finite"),
        ({"weight_decay": INF}, "optimizer.weight_decay=inf has to be at least 0, and finite"),
        ({"epsilon": NAN}, "optimizer.epsilon=nan has to be over 0, and finite"),
        ({"epsilon": INF}, "optimizer.epsilon=inf has to be over 0, and finite"),
        ({"betas": (NAN, 0.9)}, r"optimizer.betas=\(nan, 0.9\): a decay rate has to be at least 0"),
        ({"name": "sgd", "momentum": NAN}, "optimizer.momentum=nan: a decay rate has to be at least 0"),
        ({"schedule": {"name": "cosine", "final_ratio": NAN}}, "optimizer.schedule.final_ratio=nan has to be a part"),
        ({"schedule": {"name": "cosine", "final_ratio": INF}}, "optimizer.schedule.final_ratio=inf has to be a part"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1 has to be at least 0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas=\(0.9, 1.0\): a decay rate has to be at least 0 and below 1"),
        ({"name": "sgd", "momentum": 1.5}, "optimizer.momentum=1.5: a decay rate"),
        ({"epsilon": 0.0}, "optimizer.epsilon=0.0 has to be over 0"),
        ({"decay_skip": ("(",)}, r"optimizer.decay_skip: '\(' is not a regular expression"),
        ({"momentum": 0.9}, "optimizer.momentum: adamw does not read it"),
        (
            {"name": "adam", "weight_decay": 0.1},
            "optimizer.weight_decay: adam does not read it. Use optimizer.name=adamw",
        ),
        ({"options": {"b1": 0.8}}, "optimizer.options: adamw does not read it"),
        ({"name": "optax:adam", "weight_decay": 0.1}, "optimizer.weight_decay: .* Give it under optimizer.options"),
    ],
)
def test_problems(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        OptimizerConfig(learning_rate=-1.0, momentum=0.5, schedule={"name": "x"})
    assert [line.split("=")[0].split(":")[0] for line in str(error.value).splitlines()] == [
        "optimizer.momentum",
        "optimizer.learning_rate",
        "optimizer.schedule.name",
    ]
