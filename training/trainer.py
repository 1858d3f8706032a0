"""`spmdkit.Trainer`: a model, an optimizer and a mesh as one object that fits, evaluates and predicts.

    trainer = spmdkit.Trainer(model, optax.adamw(1e-3), {"fsdp": 8})
    trainer.fit((x, y), epochs=3)
    trainer.evaluate((x_test, y_test))      {"loss": 0.31}
    trainer.predict({"inputs": x_new})      a row for each row

It holds a step and its state, and calls what does the work: `fit` (callbacks), `measure` (loop) and `Predictor`
(predict). There is no folder of a run; `Checkpoints` save where they are given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from ..data.batches import eval_batches, train_batches
from ..layouts.layout_map import LayoutMap
from ..mesh.errors import UserError
from ..mesh.processes import local_copy
from ..parallel.model import BlockModel, Model, Params, with_state
from ..parallel.plan import ShardingPlan
from ..parallel.precision import FLOAT32, Precision
from ..parallel.sharding.lay_out import StrategyLike, lay_out
from ..parallel.sharding.stored_order import stored_order
from ..parallel.step.build import build_step
from ..parallel.step.state import TrainState
from .callbacks.fit import Fitted, fit
from .checkpointing.checkpoints import Checkpoints
from .given_data import rows_in_order, rows_to_train_on
from .loop import measure
from .predict import Predictor, named

DATA = {"data": -1}
"""The mesh where none is given: each device takes its share of the rows."""


class Trainer:
    """A model that trains on a mesh.

    Attributes:
        step: The compiled step, and its plan.
        state: Parameters, the optimizer's state and the model's own: global arrays, as the mesh stores them.
        global_batch: Rows of a batch, over all devices.
        seed: Of the first parameters, of randomness in training and of the order of rows.
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
        """Lays the model out and makes its first state.

        Args:
            model: A `Model`, a `BlockModel`, or what `spmdkit.adapt` gives.
            optimizer: Any optax transformation; `adjustable` (see `fit`) where callbacks change the learning rate.
            strategy: As `lay_out` takes it: {"fsdp": 4, "data": 2}, a `DeviceMesh` or a distribution; by default data
                parallelism over all devices.
            rules: Layouts by regex of the parameter's path.
            global_batch: Rows of a batch, over all devices.
            seed: 0 .. 2**32 - 1.
            params: Parameters to start from: whole arrays of the host.
            clip_norm: Largest global norm of the gradients; 0 leaves them as they are.
            accumulate: Microbatches a step.
            precision: The dtypes.

        Raises:
            UserError: The layouts do not work out, or an argument is out of its range.
        """
        plan = lay_out(model, DATA if strategy is None else strategy, rules=rules, precision=precision)
        options = {"accumulate": accumulate, "clip_norm": clip_norm, "precision": precision}
        self.step = build_step(model, optimizer, plan, **options)
        self.state: TrainState = self.step.init(seed, params)
        self.global_batch, self.seed = global_batch, seed
        self._predictor: tuple[TrainState, Predictor] | None = None
        """The last one, and the state that it predicts with."""

    @property
    def layouts(self) -> ShardingPlan:
        """The mesh, and where each parameter lives on it; `print` it for the table."""
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
        """Trains further, from the state at hand.

        Args:
            data: Arrays by name, a tuple (inputs, targets), a `Source`, `Splits`, or batches of any size one after the
                other. Every process is given the same.
            epochs: How often each row is read; the last step is whole, so that it may begin another epoch. Not for
                batches one after the other.
            steps: Optimizer steps instead.
            evaluation: Data of the same kinds, evaluated at the end and every `evaluate_every` steps: callbacks and
                records see `eval_loss` and `eval_` with the name of each of the model's metrics.
            evaluate_every: Steps between two evaluations; 0 = only at the end, and where callbacks ask.
            callbacks: See `fit` and docs/callbacks.md.
            checkpoints: Where to save; None = nowhere.
            save_every: Steps between two saves; 0 = only at the end, and where callbacks ask.
            folder: Where callbacks keep their files.
            shuffle: False for the data's own order in every epoch.
            log_every: Steps between two logged steps.
            say: Prints a line.

        Returns:
            The last state, the steps done since the trainer was made, why training has ended early, and the records.

        Raises:
            UserError: The data or a callback cannot be taken, or `steps` is needed.
            Diverged: The loss is no longer finite; the state is then lost.
        """
        source = rows_to_train_on(data)
        streamed = getattr(source, "is_stream", False)
        if steps is None and streamed:
            raise UserError("fit: batches one after the other have no known end. Give steps, in place of epochs.")
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
        held_out = [*rows_in_order(evaluation)] if evaluation is not None else None
        self._predictor = None
        with closing(batches):
            fitted = fit(
                self.step,
                self.state,
                batches,
                callbacks=callbacks,
                evaluate=None if held_out is None else lambda state: self._evaluated(state, held_out),
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
        """Evaluates the model: every row counts once, by its weight, whatever the mesh and the batch.

        Args:
            data: As for `fit`; of `Splits` the evaluation split.

        Returns:
            "loss", the weighted mean of the loss, and that of each of the model's own metrics by its name.

        Raises:
            UserError: There is nothing to evaluate, or the model cannot take the rows.
        """
        return measure(self.step, self.state.params, self._batches(rows_in_order(data)), self.state.model_state)

    def predict(self, data: Any) -> Any:
        """Predicts for all rows, in order, each once.

        Args:
            data: As for `evaluate`; targets are not needed.

        Returns:
            What the model's `predict` returns for all rows: a NumPy array with rows on dim 0; of a tree
            its leaves by path.

        Raises:
            UserError: The model has no `predict`, or cannot take the rows.
        """
        parts = [each for source in rows_in_order(data) for each in self._predictions(source)]
        if not parts:
            raise UserError("There is nothing to predict: the data gives no rows.")
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return next(iter(whole.values())) if [*whole] == [*named(0)] else whole

    def _evaluated(self, state: TrainState, sources: Sequence[Any]) -> dict[str, float]:
        found = measure(self.step, state.params, self._batches(iter(sources)), state.model_state)
        return {f"eval_{name}": value for name, value in found.items()}

    def _batches(self, sources: Iterator[Any]) -> Iterator[dict[str, jax.Array]]:
        for source in sources:
            with closing(
                eval_batches(source, self.layouts.batch_sharding(), global_batch=self.global_batch)
            ) as batches:
                yield from batches

    def _predictions(self, source: Any) -> Iterator[dict[str, np.ndarray]]:
        if self._predictor is None or self._predictor[0] is not self.state:
            model = with_state(self.step.given_model, self.state.model_state)
            self._predictor = self.state, Predictor(model, self.params, self.layouts, self.step.precision.compute)
        return self._predictor[1].rows(source, global_batch=self.global_batch)
