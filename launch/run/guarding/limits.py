"""Which values in the data the model of a config takes, before it meets them."""

from ....configs.schema import Config
from ....data.ranges import Limit, Limits
from ....data.splits import Splits
from ....models.catalog import MODELS


def data_limits(config: Config, splits: Splits) -> Limits:
    """Which token ids and classes the model of a config takes, as far as the config and the data say."""
    return model_limits(config, splits.vocabulary)


def model_limits(config: Config, vocabulary: int | None) -> Limits:
    """Which token ids and classes the model of a config takes.

    Integer inputs are token ids wherever there is a vocabulary. What targets are is known of the models of the
    catalogue alone; the user's own may mean anything by them.

    Args:
        config: The config.
        vocabulary: The number of token ids that the data says; None where it says none.
    """
    numbers = {"model.vocabulary": config.model.get("vocabulary"), "model.classes": config.model.get("classes")}
    known = {key: Limit(key, value) for key, value in numbers.items() if isinstance(value, int) and value > 0}
    tokens = Limit("vocabulary", vocabulary) if vocabulary else known.get("model.vocabulary")
    name = config.model["name"]
    if name not in MODELS:
        return Limits(inputs=tokens)
    return Limits(targets=known.get("model.classes")) if name == "mlp" else Limits(inputs=tokens, targets=tokens)
