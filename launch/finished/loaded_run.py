"""A run that was loaded: its model and parameters on a mesh, and what one does with them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ...configs.schema import Config
from ...data.batches import abstract_batch, eval_batches
from ...data.ranges import Limits, check_splits
from ...data.source import Source, Splits
from ...data.sources.arrays import ArraySource
from ...data.sources.texts.text import ByteCodec
from ...data.sources.texts.tokenizer import TokenizerCodec
from ...data.splits import is_text, open_codec, open_splits
from ...mesh.errors import UserError
from ...mesh.user_errors import told_as_users
from ...models.catalog import load_model
from ...models.sample import check_text, generate
from ...parallel.model import BlockModel, Model, Params, with_state
from ...parallel.plan import ShardingPlan
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.build import build_step
from ...parallel.step.train_step import Step
from ...training.loop import measure
from ...training.predict import Predictor
from ..inspection.export import MERGED, Exported, export
from ..inspection.finding import shown
from ..inspection.stored import StoredCheckpoint
from ..run.build import evenly_chosen, first_row, plan_layouts, search_path
from ..run.directory.provenance import changed_data
from ..run.guarding.limits import model_limits
from ..run.guarding.model_check import check_functions
from .extent import Extent, difference_from_log, extent_of, log_of_same_rows, logged_metrics, other_parameters
from .fitting import Fitted, fitting_rows, rows_alone
from .parameters import read_averages, read_tree
from .place import Place

LENGTH = 200
"""Tokens to generate where neither the caller nor `sample.length` says."""


class LoadedRun:
    """A run that was loaded: `load_run` makes it.

    Attributes:
        place: Where the run is, and the file of `config`: that in its folder, or the one that was given.
        folder: Of the run.
        checkpoint: The folder of the checkpoint that it was loaded from.
        step: Optimizer steps done when that was saved.
        config: The config of the run, with what was changed for loading it; its strategy is that of the run.
        model: The model.
        batch_rows: Rows of a batch of `evaluate` and `predictions`: `train.global_batch`, or more where that cannot be
            split over the mesh.
        params: Its parameters: global arrays laid out by `layouts`, blocks in the model's own order.
        ema: Whether they are the averages that the run kept (`optimizer.ema`).
        model_state: What the model keeps besides parameters, likewise; () for nothing.
        layouts: The mesh, and where each parameter lives on it.
    """

    def __init__(
        self,
        place: Place,
        stored: StoredCheckpoint,
        config: Config,
        fitted: Fitted,
        facts: Mapping[str, int],
        *,
        own_data: bool = False,
        ema: bool = False,
    ) -> None:
        """Builds the model, lays it out and reads its parameters.

        Args:
            place: Where the run is.
            stored: The checkpoint.
            config: Its config.
            fitted: The strategy, fitted to the devices.
            facts: What the run's data said about the sizes of the model.
            own_data: Whether the config names the run's own data, which should then be what it was made of.
            ema: Take the averages of the parameters in place of the parameters.

        Raises:
            UserError: The model or its layouts do not work out, or the checkpoint does not fit the model, or holds no
                averages.
        """
        self.place, self.folder = place, place.found.run
        self.checkpoint, self.config = stored.folder, config
        self._stored, self._facts, self._own_data = stored, facts, own_data
        self.batch_rows = fitting_rows(config.train.global_batch, fitted)
        self.model: Model | BlockModel = load_model(
            config.model, **facts, search_path=search_path(config), example=lambda: first_row(self.splits)
        )
        layouts = _fitting_layouts(config, self.model, fitted)
        self._program: Step = build_step(self.model, optax.identity(), layouts, precision=config.precision)
        self._order = stored_order(layouts)
        abstract = self._order.abstract_model(self._program.abstract_state())
        self.ema = ema
        params = read_averages(stored, abstract.params) if ema else read_tree(stored, "params", abstract.params)
        self.params: Params = params
        self.model_state: Any = read_tree(stored, "model_state", abstract.model_state)
        self.step = int(stored.folder.name) if stored.folder.name.isdecimal() else int(stored.step or 0)

    @property
    def layouts(self) -> ShardingPlan:
        """The mesh, and where each parameter lives on it; `print` it for the table."""
        return self._program.plan

    @property
    def facts(self) -> Mapping[str, int]:
        """What the run's data said about the sizes of the model."""
        return self._facts

    @property
    def vocabulary(self) -> int | None:
        """The number of token ids of the run's data; None where its inputs are no tokens."""
        return self._facts.get("vocabulary")

    @property
    def writes_text(self) -> bool:
        """Whether its tokens are text: bytes, or the ids of `data.tokenizer`."""
        return is_text(self.config.data, self.vocabulary)

    @cached_property
    def splits(self) -> Splits:
        """The training and evaluation examples that the config names, opened on first use.

        Where they are not those that the run was made of, a warning says so.

        Raises:
            UserError: The data is not there, or is not what the model takes.
            BadDataError: A value in it is not allowed.
        """
        splits = open_splits(self.config.data, search_path(self.config))
        check_splits(splits, self._limits)  # those of the model: other data may hold other ids
        changed = changed_data(self.folder, splits) if self._own_data else ""
        if changed:
            warnings.warn(changed, stacklevel=2)
        return splits

    def evaluate(
        self, rows: Source | Mapping[str, Any] | None = None, *, max_batches: int | None = None
    ) -> dict[str, float]:
        """Evaluates the model: every row counts once, by its weight, whatever the mesh.

        Args:
            rows: A source of examples (`run.splits.train`), or arrays by name with rows on dim 0; by default the
                evaluation split of the config.
            max_batches: Stop after so many batches of `train.global_batch` rows; None = all rows.

        Returns:
            "loss", the weighted mean of the loss, and that of each of the model's own metrics by its name.

        Raises:
            UserError: There is nothing to evaluate, or the model cannot take the rows.
            BadDataError: A value is not allowed.
        """
        if max_batches is not None and max_batches < 1:
            raise UserError(f"max_batches={max_batches}: at least 1 batch is evaluated. Leave it out for all rows.")
        source = self.source(rows)
        batch = abstract_batch(source, self.batch_rows, self.layouts.batch_sharding())
        check_functions(self.model, self._program, batch, evaluates=True)
        like = self._program.abstract_state().params
        batches = eval_batches(
            source,
            self.layouts.batch_sharding(),
            global_batch=self.batch_rows,
            max_batches=max_batches,
            threads=self.config.data.threads,
            limits=self._limits,
        )
        with closing(batches):
            found = measure(self._program, self._order.to_stored(self.params, like), batches, self.model_state)
        if rows is None:
            self._compare_with_log(found, extent_of(len(source), self.batch_rows, max_batches, self._log))
        return found

    def _compare_with_log(self, found: Mapping[str, float], extent: Extent) -> None:
        """Warns if the log of the run has other values for the same step, rows, and parameters."""
        if extent.logged_rows == extent.rows and not other_parameters(self.ema, self._log):
            logged = logged_metrics(self.folder, self.step)
            differs = difference_from_log(found, logged, self.config.precision.compute)
            if differs:
                warnings.warn(differs.removeprefix("warning: "), stacklevel=3)

    @cached_property
    def _log(self) -> Config | None:
        return log_of_same_rows(self.folder, self.config)

    def predict(self, batch: Mapping[str, Any]) -> Any:
        """Predicts for rows: what the model's `predict` returns for them.

        Args:
            batch: Name -> array with rows on dim 0, as many as there are; on several processes the same on each.

        Returns:
            The array or tree that `predict` returns, as NumPy arrays with these rows on dim 0, in order.

        Raises:
            UserError: The model has no `predict`, or cannot take the batch.
        """
        return self._predictor.batch(batch)

    def predictions(
        self, rows: Source | Mapping[str, Any] | None = None, *, keep: Sequence[str] = ()
    ) -> Iterator[dict[str, np.ndarray]]:
        """Predicts for all rows of some data, in order, each once, batch after batch.

        Args:
            rows: As in `evaluate`.
            keep: Arrays of the data to give beside what is predicted, such as "targets".

        Yields:
            "predictions" (or "predictions/<path>" for each leaf of a tree) and what is kept: NumPy arrays whose rows
            follow those of the batch before.

        Raises:
            UserError: The model has no `predict`, or cannot take the rows.
            BadDataError: A value is not allowed.
        """
        source, options = self.source(rows), {"threads": self.config.data.threads, "limits": self._limits}
        yield from self._predictor.rows(source, global_batch=self.batch_rows, keep=keep, **options)

    def generate(
        self,
        prompt: str | bytes | Sequence[int] | None = None,
        *,
        length: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[int]:
        """Continues a prompt; see `models.sample.generate`.

        Args:
            prompt: Tokens, or text if they are those of text; by default `sample.prompt`.
            length: Tokens to generate; by default `sample.length`.
            temperature: 0 = always the likeliest token; by default `sample.temperature`.
            seed: Of the draws; by default that of the run.

        Returns:
            The prompt and the new tokens; `text` makes text of them.

        Raises:
            UserError: The model is no language model, the prompt is no tokens of it, or a number is out of range.
        """
        wanted = self.config.sample
        prompt = (wanted.prompt if self.writes_text else []) if prompt is None else prompt
        if isinstance(prompt, str | bytes) and not self.writes_text:
            raise UserError(f"The prompt {prompt!r:.40} {self._not_text} Give a list of token ids.")
        if isinstance(prompt, str):
            check_text(prompt)
        if isinstance(prompt, str | bytes):
            prompt = self._codec.encode(prompt)
        window = self._facts.get("length", self.config.data.length)
        self._check_continues(window)
        return generate(
            with_state(self.model, self.model_state),
            self.params,
            prompt,
            length=wanted.length or LENGTH if length is None else length,
            window=window,
            temperature=wanted.temperature if temperature is None else temperature,
            seed=self.config.run.seed if seed is None else seed,
        )

    def tokens(self, prompt: str | None) -> str | list[int] | None:
        """A prompt as it is typed: text if tokens are text, else their numbers.

        Raises:
            UserError: It is no list of numbers, or the model takes no tokens.
        """
        self._check_takes_tokens()
        if prompt is None or self.writes_text:
            return prompt
        words = prompt.replace(",", " ").split()
        if not all(word.isdecimal() for word in words):
            raise UserError(f"The prompt {prompt!r:.40} {self._not_text} Write them as numbers: '17 4 256'.")
        return [int(word) for word in words]

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as people read them: text if they are text, else numbers."""
        if self.writes_text:
            return self._codec.decode(tokens)
        return " ".join(map(str, tokens))

    def export(self, target: str | Path, *, unstack: bool = False, lora: str = MERGED, force: bool = False) -> Exported:
        """Writes the parameters for other programs, from the checkpoint: as `spmdkit export`.

        Args:
            target: Ends in .safetensors, or is a folder to be made, of .npy.
            unstack: Each block by itself.
            lora: Low-rank adapters "merged" into what they adapt, or "separate".
            force: Replace an earlier export.

        Raises:
            UserError: The target is there already, or cannot be.
        """
        return export(self._stored, Path(target), unstack=unstack, lora=lora, force=force, ema=self.ema)

    def source(self, rows: Source | Mapping[str, Any] | None = None) -> Source:
        """The rows that `evaluate` and `predictions` go through.

        Args:
            rows: As there.

        Raises:
            UserError: The config has no evaluation split.
        """
        if isinstance(rows, Mapping):
            return ArraySource(rows)
        if rows is not None:
            return rows
        if self.splits.evaluation is None:
            raise UserError(
                f"The run has no evaluation split (data.eval_fraction={self.config.data.eval_fraction}). Give other "
                "data, data.eval_files=[...], or the rows that it was trained on: run.splits.train, on the command "
                "line --split train."
            )
        return self.splits.evaluation

    def __repr__(self) -> str:
        return f"<{self.title}>"

    @property
    def title(self) -> str:
        """One line: which run, which model, on which mesh."""
        mesh = self.layouts.mesh
        axes = " x ".join(f"{name} {mesh.axis_size(name)}" for name in mesh.axis_names if mesh.axis_size(name) > 1)
        model = f"{self.model.name}, {self.layouts.num_parameters:,} parameters"
        averages = " (averages, optimizer.ema)" if self.ema else ""
        return f"{shown(self.folder)} at step {self.step}: {model}{averages}; mesh {axes or '1 device'}"

    def _check_takes_tokens(self) -> None:
        if "features" in self._facts:
            raise UserError(
                f"The inputs of {self.model.name} are {self._facts['features']} numbers, not tokens, so it cannot "
                "continue a prompt. Ask what it predicts: run.predict(batch), spmdkit predict."
            )

    def _check_continues(self, window: int) -> None:
        """Checks that the model predicts one array for tokens alone; `generate` looks at its shape."""
        self._check_takes_tokens()
        predict = self.model.predict
        if predict is None:
            return
        tokens = {"inputs": jax.ShapeDtypeStruct((1, window), np.int32)}
        with told_as_users(f"model {self.model.name!r}: predict, given inputs (1, {window}) alone,", predict):
            shapes = jax.eval_shape(predict, self.params, tokens)
        if not hasattr(shapes, "shape"):
            raise UserError(
                f"The model {self.model.name} predicts a {type(shapes).__name__}. To continue a prompt it has to "
                "predict one array, logits for each position."
            )

    @property
    def _not_text(self) -> str:
        known = f"ids from 0 to {self.vocabulary - 1}" if self.vocabulary else "numbers"
        return f"is text, but the tokens of {self.model.name} are {known}, not bytes or ids of a data.tokenizer."

    @cached_property
    def _codec(self) -> ByteCodec | TokenizerCodec:
        return open_codec(self.config.data, search_path(self.config))

    @property
    def _limits(self) -> Limits:
        return model_limits(self.config, self.vocabulary)

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(
            with_state(self.model, self.model_state), self.params, self.layouts, self.config.precision.compute
        )


def _fitting_layouts(config: Config, model: Model | BlockModel, fitted: Fitted) -> ShardingPlan:
    """Lays a model out by a strategy; one that nobody asked for gives way where it does not work out."""
    devices = evenly_chosen(fitted.devices) if fitted.devices < len(jax.devices()) else None
    if fitted.as_given:
        return plan_layouts(replace(config, strategy=fitted.strategy), model, devices)
    indivisible = "replicate" if config.layouts.indivisible == "error" else config.layouts.indivisible
    lenient = replace(config, layouts=replace(config.layouts, indivisible=indivisible))
    try:
        return plan_layouts(replace(lenient, strategy=fitted.strategy), model, devices)
    except UserError:
        return plan_layouts(replace(lenient, strategy=rows_alone(fitted.devices).strategy), model, devices)
