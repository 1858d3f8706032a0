"""What a byte-level language model writes, from the state of a run."""

from typing import Any

from ...configs.schema import SampleConfig
from ...models.sample import generate
from ...parallel.model import LOGITS, has_state, without_predict
from ...parallel.sharding.stored_order import stored_order
from .build import Built


def predicts_bytes(built: Built) -> bool:
    """Whether the model predicts bytes of text, so that a sample can be read and a bigram model is a fair yardstick."""
    targets = built.splits.train[0].get("targets")
    return built.splits.vocabulary == 256 and targets is not None and targets.ndim == 1


def writes_text(built: Built) -> bool:
    """Whether `sample_text` has something to say."""
    return predicts_bytes(built) and built.model.predict is not None and not has_state(built.model)


def why_no_sample(built: Built) -> str:
    """Says why a run will write no sample at its end, where its config asks for one; "" where all is as it asks.

    Of a model that predicts no text, a section `sample` that is as it is by default asks for nothing.
    """
    wanted, name = built.config.sample, built.model.name
    asked = predicts_bytes(built) or wanted != SampleConfig()
    if not wanted.length or not asked or writes_text(built):
        return ""
    later = "`spmdkit generate` can continue a prompt"
    if built.model.predict is None:
        why = without_predict(name, "no sample is written at the end", LOGITS)
    elif has_state(built.model):
        why = f"No sample is written at the end: the model {name} keeps a state. {later} with what it has learned."
    else:
        why = f"No sample is written at the end: the targets of {name} are no bytes of text. {later} of token ids."
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
    tokens = generate(
        built.model,
        stored_order(built.layouts).to_model(params),
        prompt,
        length=length,
        window=built.config.data.length,
        temperature=temperature,
        seed=built.config.run.seed,
    )
    return bytes(tokens).decode("utf-8", errors="replace")
