"""Predictions of a model as host arrays: one row per row of the data, in order, on any mesh.

Batches go to the mesh filled up to a number of rows that it divides, and what is predicted for the filling is dropped.
Parameters and inputs are cast to the compute dtype, as they are for the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np

from ..data.batches import eval_batches
from ..data.examples import count_rows
from ..data.source import Source
from ..data.value_ranges import NO_LIMITS, Limits
from ..layouts.paths import leaves_with_paths
from ..mesh.errors import UserError, did_you_mean
from ..parallel.model import ROWS, BlockModel, Model, Params, without_predict
from ..parallel.model.user_errors import as_user_error
from ..parallel.options import cast_floats, cast_inputs
from ..parallel.plan import ShardingPlan

NAME = "predictions"


class Predictor:
    """The compiled `predict` of a model on a mesh."""

    def __init__(self, model: Model | BlockModel, params: Params, plan: ShardingPlan, compute: str) -> None:
        """Composes it; nothing is compiled yet.

        Args:
            model: The model.
            params: Its parameters, global arrays in the model's own order of blocks.
            plan: Where they live.
            compute: The dtype that the model computes in.

        Raises:
            UserError: The model predicts nothing.
        """
        predict = model.predict
        if predict is None:
            raise UserError(without_predict(model.name, "it can predict no rows", ROWS))
        self._model, self._params, self._plan, self._predict = model, params, plan, predict
        self._multiple = plan.eval_rows.total

        def cast_and_predict(params: Params, batch: Mapping[str, Any]) -> Any:
            return predict(cast_floats(params, compute), cast_inputs(batch, compute))

        self._traced = cast_and_predict
        self._run = jax.jit(cast_and_predict, out_shardings=plan.batch_sharding())

    def batch(self, batch: Mapping[str, Any]) -> Any:
        """Predicts for rows of the host.

        Args:
            batch: Name -> array with rows on dim 0, any number of them, the same on every process.

        Returns:
            What `predict` returns, its leaves as NumPy arrays with these rows on dim 0.

        Raises:
            UserError: The batch is not a mapping of such arrays, or the model cannot take it.
        """
        if not isinstance(batch, Mapping):
            given = type(batch).__name__
            raise UserError(f'predict got a {given}: a batch must be a dict of arrays, such as {{"inputs": x}}.')
        arrays = {name: np.asarray(to_host(array)) for name, array in batch.items()}
        rows = count_rows(arrays, "the arrays of a batch")
        if not rows:
            raise UserError("predict got arrays without rows; a batch must have at least one.")
        filled = np.minimum(np.arange(-(-rows // self._multiple) * self._multiple), rows - 1)
        sharding = self._plan.batch_sharding()
        placed = {
            name: jax.make_array_from_callback((len(filled), *array.shape[1:]), sharding, array[filled].__getitem__)
            for name, array in arrays.items()
        }
        return jax.tree.map(lambda leaf: to_host(leaf)[:rows], self._launch(placed))

    def rows(
        self,
        source: Source,
        *,
        global_batch: int,
        keep: Sequence[str] = (),
        threads: int = 0,
        limits: Limits = NO_LIMITS,
    ) -> Iterator[dict[str, np.ndarray]]:
        """Predicts for every row of a source, in order, each once.

        Args:
            source: The rows.
            global_batch: Rows of a batch, over all devices.
            keep: Arrays of the batch to give beside what is predicted, such as "targets".
            threads: Further threads that read examples.
            limits: What the model takes.

        Yields:
            Batch after batch: "predictions", or "predictions/<path>" for each leaf of a tree, and what is kept; NumPy
            arrays; their rows follow those of the batch before.

        Raises:
            UserError: Something to be kept is not in the data, or the model cannot take the rows.
            BadDataError: A value is not allowed.
        """
        known = [*source[0], "example"]
        missing = [name for name in keep if name not in known]
        if missing:
            near = did_you_mean(missing[0], known)
            raise UserError(f"The data lacks the array {missing[0]!r} to keep: it has {', '.join(known)}.{near}")
        batches = eval_batches(
            source, self._plan.batch_sharding(), global_batch=global_batch, threads=threads, limits=limits
        )
        waiting: list[tuple[int, Any, dict[str, Any]]] = []  # the devices work on one batch while another is read back
        with closing(batches):
            for number, batch in enumerate(batches):
                real = min(global_batch, len(source) - number * global_batch)
                waiting.append((real, self._launch(batch), {name: batch[name] for name in keep}))
                if len(waiting) > 1:
                    yield _rows(*waiting.pop(0))
        for each in waiting:
            yield _rows(*each)

    def _launch(self, batch: Mapping[str, jax.Array]) -> Any:
        self._check(batch)
        return self._run(self._params, dict(batch))

    def _check(self, batch: Mapping[str, jax.Array]) -> None:
        """Traces the model on such a batch, and looks whether what it predicts has its rows."""
        with as_user_error(f"model {self._model.name!r}: predict", self._predict):
            shapes = jax.eval_shape(self._traced, self._params, dict(batch))
        rows = next(iter(batch.values())).shape[0]
        wrong = [leaf.shape for leaf in jax.tree.leaves(shapes) if leaf.shape[:1] != (rows,)]
        if wrong or not jax.tree.leaves(shapes):
            given = f"an array of shape {wrong[0]}" if wrong else "nothing"
            raise UserError(
                f"The model {self._model.name} predicts {given} for {rows} rows. Each array that `predict` "
                "returns must have the rows of the batch on dim 0."
            )


def named(tree: Any) -> dict[str, Any]:
    """The leaves of what a model predicts by name: "predictions", or "predictions/<path>"."""
    return {f"{NAME}/{path}" if path else NAME: leaf for path, leaf in leaves_with_paths(tree)}


def to_host(array: Any) -> np.ndarray:
    """A global array as one of the host; on several processes all of them call this."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


def _rows(real: int, predicted: Any, kept: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: to_host(leaf)[:real] for name, leaf in {**named(predicted), **kept}.items()}
