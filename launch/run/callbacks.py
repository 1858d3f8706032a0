"""The callbacks of a config, and what they see of its run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...configs.paths import search_path
from ...configs.schema import Config
from ...configs.write import as_plain
from ...training.callbacks.catalog import make_callbacks
from ...training.callbacks.conductor import Conductor, Named
from ...training.callbacks.run import Run
from ...training.ending.stopping import Gate


def callbacks_of(config: Config) -> list[Named]:
    """Makes the callbacks that a config names; nothing is opened or written.

    Raises:
        UserError: The user's own function is missing, takes other options, fails, or returns no callback.
    """
    if not config.callbacks:
        return []
    offered = {"config": as_plain(config), "num_steps": config.train.steps}
    return make_callbacks(config.callbacks, offered, search_path(config.run.root))


def changes_learning_rate(config: Config) -> bool:
    """Whether a callback of a config changes the learning rate; the optimizer's state then holds a factor."""
    return any(getattr(callback, "changes_learning_rate", False) for _, callback in callbacks_of(config))


def complete(config: Config, notes: Mapping[str, Any]) -> str:
    """Why callbacks have ended a run for good.

    Args:
        config: Of the run.
        notes: Of its newest checkpoint.

    Returns:
        The reason; "" where the run goes on, with this config.
    """
    run = Run(folder=Path(config.run.dir), start=0, num_steps=config.train.steps, say=lambda line: None)
    return Conductor(callbacks_of(config), run, Gate(), prepare=False).restore(notes)


def seen_by_callbacks(
    config: Config,
    folder: Path,
    *,
    start: int,
    examples: int,
    evaluates: bool,
    metrics: Callable[[], Sequence[str] | None] = lambda: None,
    say: Callable[[str], None],
    left_out: tuple[int, ...] = (),
    generate: Callable[[Any, str, int, float], str] | None = None,
) -> Run:
    """What the callbacks of a run see of it.

    Args:
        config: Of the run.
        folder: Where it lives.
        start: Steps done.
        examples: Of the training split.
        evaluates: Whether there is an evaluation split.
        metrics: Gives the names of an evaluation's metrics; None if only an evaluation itself can tell.
        say: Prints a line.
        left_out: Numbers of batches that no step gets.
        generate: Continues a prompt: (params, prompt, length, temperature) -> text; None of a model that cannot.
    """
    run = Run(
        folder=folder,
        start=start,
        num_steps=config.train.steps,
        batch=config.train.global_batch,
        examples=examples,
        left_out=left_out,
        config=as_plain(config),
        evaluates=evaluates,
        metrics=metrics,
        say=say,
        can_scale=changes_learning_rate(config),
    )

    def generate_now(prompt: str, length: int, temperature: float) -> str:
        assert run.state is not None
        assert generate is not None
        return generate(run.state.params, prompt, length, temperature)

    run.generate = generate_now if generate else None
    return run
