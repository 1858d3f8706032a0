"""`spmdkit.Trainer`: a model, an optimizer and a mesh as one object that fits, evaluates and predicts.

    trainer = spmdkit.Trainer(model, optax.adamw(1e-3), {"fsdp": 8})
    trainer.fit((x, y), epochs=3)
    trainer.evaluate((x_test, y_test))      {"loss": 0.31}
    trainer.predict({"inputs": x_new})      a row for each row

It holds a step and its state, and calls `fit` (callbacks), `evaluate_sources` (loop) and `Predictor` (predict). It has
no run directory; `Checkpoints` save if they are given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import optax

from ..checkpoints.manager import Checkpoints
from ..data.batches import train_batches
from ..data.examples import PAIR, as_arrays
from ..data.source import Source, Splits
from ..data.sources.arrays import ArraySource
from ..data.sources.iterables import from_batches
from ..layouts.layout_map import LayoutMap
from ..mesh.errors import UserError
from ..mesh.processes import local_copy
from ..parallel.model import BlockModel, Model, Params, with_state
from ..parallel.options import FLOAT32, Precision
from ..parallel.plan import ShardingPlan
from ..parallel.sharding.lay_out import StrategyLike, lay_out
from ..parallel.sharding.stored_order import stored_order
from ..parallel.step.build import build_step
from ..parallel.step.state import TrainState
from .callbacks.fit import Fitted, fit
from .loop import evaluate_sources
from .predict import Predictor, named

DATA = {"data": -1}
"""The default mesh: every device takes its share of the rows."""


class Trainer:
    """A model that trains on a mesh.

    Attributes:
        step: The compiled step with its plan.
        state: Parameters, the optimizer's state and the model's own: global arrays, as the mesh stores them.
        global_batch: Rows of a batch, over all devices.
        seed: The seed of the first parameters, of randomness in training and of the order of rows.
    """

    def __init__(
        self,
        model: Model | BlockModel,
        optimizer: optax.GradientTransformation,
        strategy: StrategyLike | None = None,
        *,
        rules: LayoutMap | Mapping[str, Sequence[Any]] | None = None,
        global_batch: int = 64,
        seed: int = 0,
        params: Params | None = None,
        clip_norm: float = 0.0,
        accumulate: int = 1,
        precision: Precision = FLOAT32,
    ) -> None:
        """Lays out the model and creates its first state.

        Args:
            model: A `Model`, a `BlockModel`, or the result of `spmdkit.adapt`.
            optimizer: Any optax transformation; `adjustable` (see `fit`) if callbacks change the learning rate.
            strategy: {"fsdp": 4, "data": 2}, a `DeviceMesh` or a distribution, as for `lay_out`; by default data
                parallelism over all devices.
            rules: Layouts by regex of the parameter's path.
            global_batch: Rows of a batch, over all devices.
            seed: An integer from 0 to 2**32 - 1.
            params: Initial parameters, as whole arrays of the host.
            clip_norm: The maximum global norm of the gradients; 0 disables clipping.
            accumulate: Microbatches per step.
            precision: The dtypes.

        Raises:
            UserError: The layouts are invalid, or an argument is out of range.
        """
        plan = lay_out(model, DATA if strategy is None else strategy, rules=rules, precision=precision)
        options = {"accumulate": accumulate, "clip_norm": clip_norm, "precision": precision}
        self.step = build_step(model, optimizer, plan, **options)
        self.state: TrainState = self.step.init(seed, params)
        self.global_batch, self.seed = global_batch, seed
        self._predictor: tuple[TrainState, Predictor] | None = None
        """The latest predictor, with its state."""

    @property
    def layouts(self) -> ShardingPlan:
        """The mesh and the layouts of the parameters; `print` shows the table."""
        return self.step.plan

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return int(np.asarray(local_copy(self.state.step)))

    @property
    def params(self) -> Params:
        """The parameters: global arrays, blocks in the model's own order."""
        return stored_order(self.layouts).to_model(self.state).params

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        steps: int | None = None,
        evaluation: Any = None,
        evaluate_every: int = 0,
        callbacks: Sequence[Any] = (),
        checkpoints: Checkpoints | None = None,
        save_every: int = 0,
        folder: Path | str = ".",
        shuffle: bool = True,
        log_every: int = 10,
        say: Callable[[str], None] = print,
    ) -> Fitted:
        """Trains from the current state.

        Args:
            data: Arrays by name, a tuple (inputs, targets), a `Source`, `Splits`, or an iterable of batches of any
                size. Every process receives the same data.
            epochs: Passes over the rows. The last step is whole, so it may begin another epoch. Not for iterables of
                batches.
            steps: Optimizer steps, instead of epochs.
            evaluation: Data of the same kinds, evaluated at the end and every `evaluate_every` steps. Callbacks and
                records get `eval_loss`, and each of the model's metrics with the prefix `eval_`.
            evaluate_every: Steps between two evaluations; 0 = only at the end, and if callbacks ask.
            callbacks: See `fit` and docs/callbacks.md.
            checkpoints: Saves the state; None saves nothing.
            save_every: Steps between two saves; 0 = only at the end, and if callbacks ask.
            folder: The directory for the callbacks' files.
            shuffle: False for the data's own order in every epoch.
            log_every: Steps between two logged steps.
            say: Prints a line.

        Returns:
            The last state, the steps since the trainer was created, the reason for an early end, and the records.

        Raises:
            UserError: The data or a callback is invalid, or `steps` is missing.
            Diverged: The loss is not finite; the state is then lost.
        """
        source = rows_to_train_on(data)
        streamed = getattr(source, "is_stream", False)
        if steps is None and streamed:
            raise UserError("fit: the end of an iterable of batches is unknown. Give steps instead of epochs.")
        start, examples = self.steps, 0 if streamed else len(source)
        number = max(1, -(-epochs * examples // self.global_batch)) if steps is None else steps
        batches = train_batches(
            source,
            self.layouts.batch_sharding(),
            global_batch=self.global_batch,
            seed=self.seed,
            start_step=0 if streamed else start,
            num_steps=number,
            shuffle=shuffle,
        )
        held_out = [*rows_in_order(evaluation)] if evaluation is not None else []
        self._predictor = None
        with closing(batches):
            fitted = fit(
                self.step,
                self.state,
                batches,
                callbacks=callbacks,
                evaluate=None if evaluation is None else lambda state: self._evaluate_held_out(state, held_out),
                evaluate_every=evaluate_every,
                checkpoints=checkpoints,
                save_every=save_every,
                folder=folder,
                start=start,
                num_steps=start + number,
                global_batch=self.global_batch,
                examples=examples,
                log_every=log_every,
                say=say,
            )
        self.state = fitted.state
        return fitted

    def evaluate(self, data: Any) -> dict[str, float]:
        """Evaluates the model: every row counts once, by its weight, for every mesh and batch size.

        Args:
            data: Data as for `fit`; of `Splits`, the evaluation split.

        Returns:
            The weighted means of the loss ("loss") and of each of the model's own metrics, by name.

        Raises:
            UserError: There is nothing to evaluate, or the rows do not fit the model.
        """
        return self._evaluate(self.state, rows_in_order(data))

    def predict(self, data: Any) -> Any:
        """Predicts all rows once, in order.

        Args:
            data: Data as for `evaluate`; targets are not needed.

        Returns:
            The results of the model's `predict` for all rows: a NumPy array with rows on dim 0; for a tree, its leaves
            by path.

        Raises:
            UserError: The model has no `predict`, or the rows do not fit it.
        """
        parts = [each for source in rows_in_order(data) for each in self._predictions(source)]
        if not parts:
            raise UserError("There is nothing to predict: the data is empty.")
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return next(iter(whole.values())) if [*whole] == [*named(0)] else whole

    def _evaluate_held_out(self, state: TrainState, sources: Iterable[Any]) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in self._evaluate(state, sources).items()}

    def _evaluate(self, state: TrainState, sources: Iterable[Any]) -> dict[str, float]:
        return evaluate_sources(self.step, state.params, state.model_state, sources, global_batch=self.global_batch)

    def _predictions(self, source: Any) -> Iterator[dict[str, np.ndarray]]:
        if self._predictor is None or self._predictor[0] is not self.state:
            model = with_state(self.step.given_model, self.state.model_state)
            self._predictor = self.state, Predictor(model, self.params, self.layouts, self.step.precision.compute)
        return self._predictor[1].rows(source, global_batch=self.global_batch)


def rows_to_train_on(data: Any) -> Source:
    """The rows of some data by their number.

    Args:
        data: `Splits`, of which the training split is taken; a mapping of arrays or tensors with rows on dim 0, nested
            or not, or a tuple (inputs, targets) of them; a `Source`; or a list, an iterable or an iterator of batches,
            or a function of the epoch that gives one.

    Raises:
        UserError: It is none of these, or its arrays do not fit together.
    """
    if isinstance(data, Splits):
        return data.train
    if isinstance(data, Mapping | tuple):
        return ArraySource(as_arrays(data, PAIR))
    return from_batches(data).train if _gives_batches(data) else data


def rows_in_order(data: Any) -> Iterator[Source]:
    """Sources whose rows, one after the other, are all rows of some data; of batches one source each.

    Args:
        data: Data in any form that `rows_to_train_on` accepts; for `Splits`, the evaluation split.

    Raises:
        UserError: It is none of these, or there is no evaluation split.
    """
    if isinstance(data, Splits):
        if data.evaluation is None:
            raise UserError("These splits lack an evaluation split. Give splits.train, or other data.")
        yield data.evaluation
    elif isinstance(data, Mapping | tuple) or not _gives_batches(data):
        yield rows_to_train_on(data)
    else:
        batches: Any = data(0) if callable(data) else data
        for batch in batches:
            yield ArraySource(as_arrays(batch, PAIR))


def _gives_batches(data: Any) -> bool:
    """True for data that is read batch by batch, from its beginning.

    Raises:
        UserError: It is not data.
    """
    if not isinstance(data, list) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        with suppress(LookupError, TypeError):  # of empty data, and of tables, which are indexed by name
            if isinstance(data[0], Mapping):
                return False
    elif hasattr(data, "__iter__") or callable(data):
        return True
    raise UserError(
        f"A {type(data).__name__} alone is not data for a model. Give arrays by name, such as "
        '{"inputs": x, "targets": y}, a tuple (inputs, targets), a source, or batches.'
    )
