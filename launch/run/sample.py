"""The text that a language model writes, from the state of a run."""

from typing import Any

from ...configs.schema import SampleConfig
from ...data.sources.texts.text import BYTES
from ...data.splits import is_text, open_codec
from ...models.sample import generate
from ...parallel.model import LOGITS, has_state, without_predict
from ...parallel.sharding.stored_order import stored_order
from .build import Built, search_path


def predicts_bytes(built: Built) -> bool:
    """Whether the model predicts bytes of text, so that a bigram model is a fair yardstick."""
    return built.splits.vocabulary == BYTES and predicts_text(built)


def predicts_text(built: Built) -> bool:
    """Whether the model predicts tokens of text, so that a sample can be read."""
    targets = built.splits.train[0].get("targets")
    return is_text(built.config.data, built.splits.vocabulary) and targets is not None and targets.ndim == 1


def writes_text(built: Built) -> bool:
    """Whether `sample_text` can write a sample."""
    return predicts_text(built) and built.model.predict is not None and not has_state(built.model)


def why_no_sample(built: Built) -> str:
    """Says why a run will write no sample at its end, where its config asks for one; "" where all is as it asks.

    Of a model that predicts no text, a section `sample` that is as it is by default asks for nothing.
    """
    wanted, name = built.config.sample, built.model.name
    asked = predicts_text(built) or wanted != SampleConfig()
    if not wanted.length or not asked or writes_text(built):
        return ""
    later = "`spmdkit generate` can continue a prompt"
    if built.model.predict is None:
        why = without_predict(name, "no sample is written at the end", LOGITS)
    elif has_state(built.model):
        why = f"No sample is written at the end: the model {name} keeps a state. {later} with what it has learned."
    else:
        why = (
            f"No sample is written at the end: the targets of {name} are neither bytes of text nor ids of a "
            f"data.tokenizer. {later} of token ids."
        )
    return f"{why} Set sample.length=0 where none is wanted."


def sample_text(built: Built, params: Any, prompt: str, length: int, temperature: float) -> str:
    """Continues a prompt; of a run of several processes all call this together.

    Args:
        built: A run that writes text.
        params: Of its state, as they are stored.
        prompt: What the text begins with.
        length: Tokens to generate.
        temperature: 0 = always the likeliest token; 1 = the model's own distribution.
    """
    codec = open_codec(built.config.data, search_path(built.config))
    tokens = generate(
        built.model,
        stored_order(built.layouts).to_model(params),
        codec.encode(prompt),
        length=length,
        window=built.config.data.length,
        temperature=temperature,
        seed=built.config.run.seed,
    )
    return codec.decode(tokens)
