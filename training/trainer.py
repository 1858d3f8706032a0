"""`spmdkit.Trainer`: a model, an optimizer and a mesh as one object that fits, evaluates and predicts.

    trainer = spmdkit.Trainer(model, optax.adamw(1e-3), {"fsdp": 8})
    trainer.fit((x, y), epochs=3)
    trainer.evaluate((x_test, y_test))      {"loss": 0.31}
    trainer.predict({"inputs": x_new})      a row for each row

It holds a step and its state, and calls `fit` (callbacks), `evaluate_sources` (loop) and `Predictor` (predict). It has
no run directory; `Checkpoints` save if they are given.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..checkpoints.manager import Checkpoints
from ..data.batches import abstract_batch, train_batches
from ..data.examples import PAIR, as_arrays
from ..data.source import Source, Splits, is_stream
from ..data.sources.arrays import ArraySource
from ..data.sources.iterables import from_batches
from ..layouts.layout_map import LayoutMap
from ..mesh.errors import UserError, counted
from ..mesh.processes import local_copy
from ..parallel.model import BlockModel, Model, Params, with_state
from ..parallel.model.arguments import check_is_optimizer, require_model
from ..parallel.model.user_errors import user_items
from ..parallel.options import FLOAT32, Precision
from ..parallel.plan import ShardingPlan
from ..parallel.sharding.batch_rows import check_rows
from ..parallel.sharding.lay_out import StrategyLike, lay_out
from ..parallel.sharding.stored_order import stored_order
from ..parallel.step.build import build_step
from ..parallel.step.inputs import BatchShapes, shapes_of
from ..parallel.step.model_functions import check_functions
from ..parallel.step.state import TrainState
from .callbacks.fit import Fitted, Interrupted, fit
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
        model = require_model(model, "Trainer")
        check_is_optimizer(optimizer, "Trainer: the optimizer")
        if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
            raise UserError(f"Trainer: global_batch={global_batch!r} must be a positive integer, the rows of a batch.")
        plan = lay_out(model, DATA if strategy is None else strategy, rules=rules, precision=precision)
        self.step = build_step(model, optimizer, plan, accumulate=accumulate, clip_norm=clip_norm, precision=precision)
        check_rows(plan, global_batch, accumulate)
        self.state: TrainState = self.step.init(seed, params)
        self.global_batch = global_batch
        self.seed = seed
        self._predictor: tuple[TrainState, Predictor] | None = None
        """The latest predictor, with its state."""
        self._checked: set[BatchShapes] = set()
        """The shapes of batches for which the model's functions have been traced."""

    def __repr__(self) -> str:
        return f"Trainer({self.layouts.title}; {self.global_batch} rows a batch, {counted(self.steps, 'step')} done)"

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
        return stored_order(self.layouts).to_model(self.state.params)

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
        progress: bool = True,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
        say: Callable[[str], None] | None = None,
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
            progress: Shows a panel on a terminal and in a notebook, and elsewhere a line for each logged step.
            on_progress: Receives the record of each logged step, by name.
            say: Prints a line of a callback; by default, beside the progress.

        Returns:
            The last state, the steps since the trainer was created, the reason for an early end, and the records.

        Raises:
            Interrupted: SIGINT (Ctrl-C) ended training after a whole step. The trainer has the state after that step,
                so another call of `fit` continues.
            UserError: The data does not fit the model, a callback is invalid, or `steps` is missing.
            Diverged: The loss is not finite; the state is then lost.
        """
        source = rows_to_train_on(data)
        start = self.steps
        examples = 0 if is_stream(source) else len(source)
        number = _steps_of(epochs, examples, self.global_batch) if steps is None else steps
        self._check_functions(source, evaluates=evaluation is not None)
        batches = self._batches(source, number, shuffle=shuffle)
        self._predictor = None
        with closing(batches), self._keeps_state():
            fitted = fit(
                self.step,
                self.state,
                batches,
                callbacks=callbacks,
                evaluate=self._evaluator(evaluation),
                evaluate_every=evaluate_every,
                checkpoints=checkpoints,
                save_every=save_every,
                folder=folder,
                start=start,
                num_steps=start + number,
                global_batch=self.global_batch,
                examples=examples,
                log_every=log_every,
                progress=progress,
                on_progress=on_progress,
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

    @contextmanager
    def _keeps_state(self) -> Iterator[None]:
        """Takes the state of an interrupted `fit`, which has consumed the trainer's."""
        try:
            yield
        except Interrupted as interruption:
            self.state = interruption.fitted.state
            raise

    def _check_functions(self, source: Source, *, evaluates: bool) -> None:
        """Traces the model's functions on rows of a source, once for each of their shapes.

        Raises:
            ModelError: A function raises an exception or returns an invalid result.
        """
        batch = abstract_batch(source, self.global_batch, self.layouts.batch_sharding())
        shapes = shapes_of(batch)
        if shapes not in self._checked:
            check_functions(self.step.given_model, self.step, batch, evaluates=evaluates)
            self._checked.add(shapes)

    def _batches(self, source: Source, number: int, *, shuffle: bool) -> Generator[dict[str, jax.Array], None, None]:
        """Returns the batches of the next steps; a stream begins anew."""
        return train_batches(
            source,
            self.layouts.batch_sharding(),
            global_batch=self.global_batch,
            seed=self.seed,
            start_step=0 if is_stream(source) else self.steps,
            num_steps=number,
            shuffle=shuffle,
        )

    def _evaluator(self, data: Any) -> Callable[[TrainState], dict[str, float]] | None:
        """Returns the evaluation of a state on held-out data, with names for callbacks; None without data."""
        if data is None:
            return None
        sources = [*rows_in_order(data)]

        def evaluate(state: TrainState) -> dict[str, float]:
            metrics = self._evaluate(state, sources)
            return {f"eval_{name}": value for name, value in metrics.items()}

        return evaluate

    def _evaluate(self, state: TrainState, sources: Iterable[Any]) -> dict[str, float]:
        return evaluate_sources(
            self.step, state.params, state.model_state, self._checking(sources), global_batch=self.global_batch
        )

    def _checking(self, sources: Iterable[Any]) -> Iterator[Any]:
        """Yields the sources, after a check of the model's functions on the rows of each."""
        for source in sources:
            if len(source):
                self._check_functions(source, evaluates=True)
            yield source

    def _predictions(self, source: Any) -> Iterator[dict[str, np.ndarray]]:
        if self._predictor is None or self._predictor[0] is not self.state:
            model = with_state(self.step.given_model, self.state.model_state)
            self._predictor = self.state, Predictor(model, self.params, self.layouts, self.step.precision.compute)
        return self._predictor[1].rows(source, global_batch=self.global_batch)


def _steps_of(epochs: int, examples: int, global_batch: int) -> int:
    """Returns the steps of some passes over the data, rounded up; `examples` is 0 for a stream.

    Raises:
        UserError: The data is a stream, whose passes have no known number of steps.
    """
    if not examples:
        raise UserError("fit: the end of an iterable of batches is unknown. Give steps instead of epochs.")
    return max(1, -(-epochs * examples // global_batch))


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
        for batch in user_items(f"reading batches of a {type(data).__name__}", lambda: batches):
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
