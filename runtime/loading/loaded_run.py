"""A loaded run: its model and parameters on a mesh; evaluation, predictions, generation and export."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ...checkpoints.directory import display_path
from ...checkpoints.export import MERGED, Exported, export
from ...checkpoints.restore import StoredCheckpoint, read_averages, read_tree
from ...configs.load import load_config
from ...configs.schema import Config
from ...data.batches import abstract_batch
from ...data.source import Source, Splits
from ...data.sources.arrays import ArraySource
from ...data.sources.texts import ByteCodec
from ...data.sources.tokenizer import TokenizerCodec
from ...data.splits import is_text, open_codec, open_splits
from ...data.value_ranges import Limits, check_splits
from ...mesh.errors import UserError
from ...models.catalog import load_model, transformer_of, without_adapters
from ...models.generation import check_text, generate
from ...models.hugging_face.weights_writer import save
from ...parallel.model import BlockModel, Model, Params, with_state
from ...parallel.plan import ShardingPlan
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.build import build_step
from ...parallel.step.model_functions import check_functions
from ...parallel.step.model_order import abstract_in_model_order
from ...parallel.step.train_step import Step
from ...training.loop import evaluate_sources
from ...training.metrics import read_metrics
from ...training.predict import Predictor
from ..build_run import choose_evenly, first_row, model_limits, plan_layouts
from ..provenance import changed_data
from .fitting import Fitted, fitting_rows, rows_alone

DEFAULT_LENGTH = 200
"""The default number of tokens to generate, if `sample.length` is 0."""
ROUNDING = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""The relative difference that another mesh can cause, by the dtype of the computation."""


class LogComparison(NamedTuple):
    """An evaluation, compared with that in the log of the run.

    Attributes:
        rows: The number of evaluated rows.
        log_rows: The number of rows of an evaluation in the log; None if the log is of other data, or missing.
        logged: The metrics in the log after the same step, of the same rows and parameters, by name.
        remark: A line about other rows or parameters in the log; "" if they are the same.
        warning: A line with the values that differ; "" if all agree up to rounding.
    """

    rows: int
    log_rows: int | None = None
    logged: Mapping[str, float] = {}
    remark: str = ""
    warning: str = ""


class LoadedRun:
    """A loaded run, created by `load_run`.

    Attributes:
        place: The run on disk with its checkpoint and config file.
        folder: The run directory.
        checkpoint: The directory of the checkpoint.
        step: Optimizer steps done at the time of the checkpoint.
        config: The configuration of the run with the overrides; its strategy is that of the run.
        model: The model.
        facts: The sizes of the model that follow from the run's data.
        batch_rows: Rows of a batch of `evaluate` and `predictions`: `train.global_batch`, or more if the mesh cannot
            split that.
        params: The parameters: global arrays laid out by `layouts`, blocks in the model's own order.
        ema: Whether they are the averages that the run kept (`optimizer.ema`).
        model_state: The model's state besides the parameters, laid out likewise, or ().
        layouts: The mesh and the layouts of the parameters.
    """

    def __init__(
        self, folder: Path, stored: StoredCheckpoint, config: Config, fitted: Fitted, *, own_data: bool, ema: bool
    ) -> None:
        """Builds the model, lays it out and reads its parameters.

        Args:
            folder: The directory of the run.
            stored: The checkpoint.
            config: Its configuration.
            fitted: The strategy, fitted to the devices.
            own_data: True if the config names the run's own data; its fingerprint is then compared.
            ema: Read the averages of the parameters instead of the parameters.

        Raises:
            UserError: The model or its layouts are invalid, or the checkpoint does not fit the model or has no
                averages.
        """
        self.folder, self.checkpoint, self.config = folder, stored.folder, config
        self.facts = {name: int(value) for name, value in stored.about.get("data", {}).items()}
        self._stored, self._own_data = stored, own_data
        self.batch_rows = fitting_rows(config.train.global_batch, fitted)
        self.model: Model | BlockModel = load_model(
            config.model, **self.facts, search_path=config.run.search_path, example=lambda: first_row(self.splits)
        )
        layouts = self._fit_layouts(fitted)
        self._program: Step = build_step(self.model, optax.identity(), layouts, precision=config.precision)
        self._order = stored_order(layouts)
        abstract = abstract_in_model_order(self._program.abstract_state())
        self.ema = ema
        params = read_averages(stored, abstract.params) if ema else read_tree(stored, "params", abstract.params)
        self.params: Params = params
        self.model_state: Any = read_tree(stored, "model_state", abstract.model_state)
        self.step = stored.step

    def _fit_layouts(self, fitted: Fitted) -> ShardingPlan:
        """Lays out the model by a strategy; one that the user did not request may fall back to data parallelism."""
        config, devices = self.config, choose_evenly(fitted.devices) if fitted.devices < len(jax.devices()) else None
        if fitted.as_given:
            return plan_layouts(replace(config, strategy=fitted.strategy), self.model, devices)
        indivisible = "replicate" if config.layouts.indivisible == "error" else config.layouts.indivisible
        lenient = replace(config, layouts=replace(config.layouts, indivisible=indivisible))
        try:
            return plan_layouts(replace(lenient, strategy=fitted.strategy), self.model, devices)
        except UserError:
            return plan_layouts(replace(lenient, strategy=rows_alone(fitted.devices).strategy), self.model, devices)

    @property
    def layouts(self) -> ShardingPlan:
        """The mesh and the layouts of the parameters; `print` shows the table."""
        return self._program.plan

    @property
    def vocabulary(self) -> int | None:
        """The number of token ids of the run's data; None if its inputs are not tokens."""
        return self.facts.get("vocabulary")

    @property
    def writes_text(self) -> bool:
        """True if its tokens are text: bytes, or the ids of `data.tokenizer`."""
        return is_text(self.config.data, self.vocabulary)

    @cached_property
    def splits(self) -> Splits:
        """The training and evaluation examples that the config names, opened on first use.

        Warns if the data is not that of the run.

        Raises:
            UserError: The data is missing, or does not fit the model.
            BadDataError: A value in it is not allowed.
        """
        splits = open_splits(self.config.data, self.config.run.search_path, self.config.train.global_batch)
        check_splits(splits, self._limits)  # the model's limits: other data may contain other ids
        if self._own_data and (changed := changed_data(self.folder, splits)):
            warnings.warn(changed, stacklevel=2)
        return splits

    def evaluate(
        self, rows: Source | Mapping[str, Any] | None = None, *, max_batches: int | None = None
    ) -> dict[str, float]:
        """Evaluates the model: every row counts once, by its weight, for every mesh.

        Args:
            rows: A source of examples (`run.splits.train`), or arrays by name with rows on dim 0; by default the
                evaluation split of the config.
            max_batches: The number of batches of `train.global_batch` rows; None = all rows.

        Returns:
            The weighted means of the loss ("loss") and of each of the model's own metrics, by name.

        Raises:
            UserError: There is nothing to evaluate, or the rows do not fit the model.
            BadDataError: A value is not allowed.
        """
        if max_batches is not None and max_batches < 1:
            raise UserError(f"max_batches={max_batches} must be at least 1. Omit it for all rows.")
        source = self.source(rows)
        batch = abstract_batch(source, self.batch_rows, self.layouts.batch_sharding())
        check_functions(self.model, self._program, batch, evaluates=True)
        found = evaluate_sources(
            self._program,
            self._order.to_stored(self.params, self._program.abstract_state().params),
            self.model_state,
            [source],
            global_batch=self.batch_rows,
            max_batches=max_batches,
            threads=self.config.data.threads,
            limits=self._limits,
        )
        if rows is None and (warning := compare_with_log(self, len(source), max_batches, found).warning):
            warnings.warn(warning, stacklevel=2)
        return found

    def predict(self, batch: Mapping[str, Any]) -> Any:
        """Returns the results of the model's `predict` for some rows.

        Args:
            batch: Name -> array with any number of rows on dim 0; the same on every process.

        Returns:
            The array or tree that `predict` returns, as NumPy arrays with these rows on dim 0, in order.

        Raises:
            UserError: The model has no `predict`, or the batch does not fit it.
        """
        return self._predictor.batch(batch)

    def predictions(
        self, rows: Source | Mapping[str, Any] | None = None, *, keep: Sequence[str] = ()
    ) -> Iterator[dict[str, np.ndarray]]:
        """Predicts all rows of some data once, in order, batch by batch.

        Args:
            rows: The rows, see `evaluate`.
            keep: Arrays of the data to return with the predictions, such as "targets".

        Yields:
            "predictions" (or "predictions/<path>" for each leaf of a tree) and the kept arrays: NumPy arrays whose rows
            follow those of the previous batch.

        Raises:
            UserError: The model has no `predict`, or the rows do not fit it.
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
        """Continues a prompt; see `models.generation.generate`.

        Args:
            prompt: Tokens, or text (if the tokens are not text: their numbers, "17 4"); by default `sample.prompt`.
            length: Tokens to generate; by default `sample.length`.
            temperature: 0 = always the likeliest token; by default `sample.temperature`.
            seed: The random seed; by default that of the run.

        Returns:
            The prompt and the new tokens; `text` converts them to text.

        Raises:
            UserError: The model is not a language model, the prompt is invalid, or a number is out of range.
        """
        wanted = self.config.sample
        window = self.facts.get("length", self.config.data.length)
        if "features" in self.facts:
            raise UserError(
                f"The inputs of {self.model.name} are {self.facts['features']} numbers, not tokens, so it cannot "
                "continue a prompt. Ask what it predicts: run.predict(batch), spmdkit predict."
            )
        if prompt is None:
            prompt = wanted.prompt if self.writes_text else []
        if isinstance(prompt, str | bytes):
            prompt = self._encode(prompt)
        return generate(
            with_state(self.model, self.model_state),
            self.params,
            prompt,
            length=wanted.length or DEFAULT_LENGTH if length is None else length,
            window=window,
            temperature=wanted.temperature if temperature is None else temperature,
            seed=self.config.run.seed if seed is None else seed,
        )

    def _encode(self, prompt: str | bytes) -> list[int]:
        """Returns the tokens of a text; if tokens are not text, it must list them as numbers."""
        if self.writes_text:
            if isinstance(prompt, str):
                check_text(prompt)
            return list(self._codec.encode(prompt))
        words = prompt.replace(",", " ").split() if isinstance(prompt, str) else [""]
        if not all(word.isdecimal() for word in words):
            known = f"ids from 0 to {self.vocabulary - 1}" if self.vocabulary else "numbers"
            raise UserError(
                f"The prompt {prompt!r:.40} is text, but the tokens of {self.model.name} are {known}, not bytes or ids "
                "of a data.tokenizer. Write them as numbers: '17 4 256'."
            )
        return [int(word) for word in words]

    def text(self, tokens: Sequence[int]) -> str:
        """Returns tokens as text if they are text, otherwise as numbers."""
        return self._codec.decode(tokens) if self.writes_text else " ".join(map(str, tokens))

    def export(self, target: str | Path, *, lora: str = MERGED, force: bool = False) -> Exported:
        """Writes the parameters for other programs, from the checkpoint, like `spmdkit export`.

        Args:
            target: A file that ends in .safetensors, or a new directory for .npy files.
            lora: Low-rank adapters: "merged" into the adapted parameters, or "separate".
            force: Replace an earlier export.

        Raises:
            UserError: The target exists, or is invalid.
        """
        return export(self._stored, Path(target), lora=lora, force=force, ema=self.ema)

    def source(self, rows: Source | Mapping[str, Any] | None = None) -> Source:
        """Returns the rows that `evaluate` and `predictions` use.

        Args:
            rows: The rows, see `evaluate`.

        Raises:
            UserError: The config lacks an evaluation split.
        """
        if isinstance(rows, Mapping):
            return ArraySource(rows)
        if rows is not None:
            return rows
        if self.splits.evaluation is None:
            raise UserError(
                f"The run lacks an evaluation split (data.eval_fraction={self.config.data.eval_fraction}). Give other "
                "data, data.eval_files=[...], or the rows that it was trained on: run.splits.train, on the command "
                "line --split train."
            )
        return self.splits.evaluation

    def __repr__(self) -> str:
        return f"<{self.title}>"

    @property
    def title(self) -> str:
        """The run, the model and the mesh, as one line."""
        model = f"{self.model.name}, {self.layouts.num_parameters:,} parameters"
        averages = " (averages, optimizer.ema)" if self.ema else ""
        return f"{display_path(self.folder)} at step {self.step}: {model}{averages}; {self.layouts.mesh.summary}"

    @cached_property
    def _codec(self) -> ByteCodec | TokenizerCodec:
        return open_codec(self.config.data, self.config.run.search_path)

    @property
    def _limits(self) -> Limits:
        return model_limits(self.config.model, self.vocabulary)

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(
            with_state(self.model, self.model_state), self.params, self.layouts, self.config.precision.compute
        )


def compare_with_log(
    run: LoadedRun, source_rows: int, max_batches: int | None, metrics: Mapping[str, float]
) -> LogComparison:
    """Compares an evaluation of the run's evaluation split with the log of the run.

    The log is of the config.yaml in the run directory: only this file contains the key=value arguments of the training.

    Args:
        run: The run.
        source_rows: The number of rows of the split.
        max_batches: The number of batches that were evaluated; None = all.
        metrics: The metrics found.
    """
    rows = source_rows if max_batches is None else min(source_rows, max_batches * run.batch_rows)
    try:
        log = load_config(run.folder / "config.yaml", sizes=False)
        records = read_metrics(run.folder / "metrics.jsonl") if (run.folder / "metrics.jsonl").exists() else []
    except (UserError, OSError):
        return LogComparison(rows)
    if (log.data, log.run.root) != (run.config.data, run.config.run.root):
        return LogComparison(rows)
    log_rows = min(source_rows, log.eval.batches * log.train.global_batch) if log.eval.batches else source_rows
    if log_rows != rows:
        remark = (
            f"The log of the run is of {log_rows:,} rows (eval.batches={log.eval.batches}); --batches selects how many."
        )
        return LogComparison(rows, log_rows, remark=remark)
    if run.ema != log.optimizer.ema.evaluate:
        same = "parameters themselves: omit" if run.ema else "averages (optimizer.ema.evaluate): use"
        return LogComparison(rows, log_rows, remark=f"The log of the run is of the {same} --ema for the same.")
    record = next((each for each in reversed(records) if each.get("step") == run.step), {})
    logged = {
        name.removeprefix("eval_"): float(value)
        for name, value in record.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }
    bound = ROUNDING.get(run.config.precision.compute, ROUNDING["float32"])
    differing = [
        f"{name} {metrics[name]:.6g} here, {value:.6g} in the log"
        for name, value in logged.items()
        if name in metrics and not abs(metrics[name] - value) <= bound * max(abs(metrics[name]), abs(value), 1e-3)
    ]
    warning = (
        f"the log of the run has other values for the same rows and step: {'; '.join(differing)}. The model's code, "
        "its data, a library, or metrics.jsonl has changed since, or the parameters are not those of the run (spmdkit "
        "checkpoint verify)."
    )
    return LogComparison(rows, log_rows, logged, warning=warning if differing else "")


def write_folder(run: LoadedRun, target: Path) -> str:
    """Writes the parameters as a directory that `transformers` loads: config.json and .safetensors files.

    Args:
        run: A run of the model `hugging_face`, or of a transformer that matches a family.
        target: The new directory. The tokenizer of the directory that the run started from, and its other files about
            tokens, are copied.

    Returns:
        A line about the written files.

    Raises:
        UserError: The model does not match a family, the directory exists, or several processes hold the parameters.
        OSError: The disk is full.
    """
    if jax.process_count() > 1:
        raise UserError("Only one process can write a Hugging Face directory. Start the command without a launcher.")
    spec, facts, folders = run.config.model, run.facts, run.config.run.search_path
    config, origin = transformer_of(spec, facts, folders)
    save(target, config, without_adapters(spec, run.params, facts, folders), like=origin or None)
    return f"Wrote {display_path(target.absolute())}: config.json and the weights of step {run.step}, for transformers."
