"""What a byte-level language model writes, from the state of a run."""

from typing import Any

from ...models.sample import generate
from ...parallel.model import has_state
from ...parallel.sharding.stored_order import stored_order
from .build import Built


def predicts_bytes(built: Built) -> bool:
    """Whether the model predicts bytes of text, so that a sample can be read and a bigram model is a fair yardstick."""
    targets = built.splits.train[0].get("targets")
    return built.splits.vocabulary == 256 and targets is not None and targets.ndim == 1


def writes_text(built: Built) -> bool:
    """Whether `sample_text` has something to say."""
    return predicts_bytes(built) and built.model.predict is not None and not has_state(built.model)


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
