"""The interface of a model: a pair of pure functions, or the same loss split into embed, block and head.

Any `init` / `loss` pair trains (`Model`). A model written as embed / block / head (`BlockModel`) also lets the
runtime work one block at a time: gather a block's parameters just before its use, recompute it in backward, and
place blocks on pipeline stages. The functions do not use collectives or a mesh: they receive whole
parameters, cast to the compute dtype, and the rows of the batch on one device.

A `BlockModel` with `parallelize` can also split its own work over the axes tensor, context and expert: its functions
then receive their part of the parameters that `rules` split, run inside `shard_map`, and use collectives. Every device
must return its own share of (sum, weight), and the shares of all devices must add up to the total.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...mesh.errors import docs_url
from ..collectives import Traffic
from ..context import ContextConfig
from ..expert import ExpertConfig
from ..tensor import TensorConfig

Params: TypeAlias = Any
"""A pytree of arrays."""
Batch: TypeAlias = Mapping[str, Array]
"""Arrays with the rows of the batch on dim 0."""
AbstractBatch: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""The shapes and dtypes of a batch."""
Activations: TypeAlias = Any
"""A pytree of arrays that flows from block to block."""
ROWS = "predict(params, batch) -> array with the rows of the batch on dim 0"
"""The signature of `predict` for predicting rows of data."""
LOGITS = 'predict(params, batch) -> logits (1, L, vocabulary) for batch["inputs"], (1, L) token ids'
"""The signature of `predict` for continuing a prompt."""


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """The options, with resolved sizes, of the strategies that split a model's work; the default splits nothing.

    It is always passed as an argument, never stored in a global variable.

    Attributes:
        tensor: Splits matrix products and the positions between them, see `tensor.py`.
        context: Splits the positions of a row, see `context.py`.
        expert: Splits the experts of a mixture, see `expert.py`.
        added: The options of strategies that were added to `STRATEGIES`, by name.
        platform: The platform of the devices ("cpu", "gpu", "tpu"), which selects kernels.
    """

    tensor: TensorConfig = field(default_factory=TensorConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    added: Mapping[str, Any] = field(default_factory=dict, hash=False)
    platform: str = "cpu"

    @property
    def splits_anything(self) -> bool:
        """True if any work is split."""
        return any(config.size > 1 for config in (self.tensor, self.context, self.expert, *self.added.values()))

    @property
    def rings(self) -> tuple[str, ...]:
        """The options that send to neighbors, see `xla/ring_hop.py`."""
        context, tensor = self.context, self.tensor
        attention = context.size > 1 and context.attention == "ring"
        products = tensor.size > 1 and tensor.collective_matmul
        named = {"strategy.context.attention=ring": attention, "strategy.tensor.collective_matmul": products}
        return tuple(name for name, used in named.items() if used)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Any model: two pure functions over a pytree of parameters.

    Attributes:
        init: `init(key) -> params`, traced under `jit` only, so no array is ever whole on one device.
        loss: `loss(params, batch, key) -> (sum, weight)`, two float scalars over the rows it is given: the weighted
            sum of the loss and the sum of the weights. The runtime divides once, by the weight of the whole global
            batch. `key` is the same on every device and None in evaluation; randomness that must not depend on the
            mesh folds in `batch["example"]`, the global index of each row. Metrics may follow the pair, see
            `loss_sums.py`. If rows depend on each other, the loss must call `batch_axes()`.
        predict: `predict(params, batch) -> array`, optional; `predict(params, batch, state)` for a model with a state.
        name: The name in reports.
        flops_per_row: The floating-point operations of forward and backward for one row, for model FLOP/s; None: those
            of the products and convolutions in the traced loss.
        flops_of_length: `flops_of_length(length) -> flops_per_row` for rows with that many positions, if batches have
            several lengths; None means `flops_per_row` for all rows.
        init_state: `init_state(key) -> state`, for a model with arrays that gradients do not update, such as the
            running statistics of batch norm: a tree of arrays, whole on every device. Its loss is then
            `loss(params, batch, key, state) -> LossSums`, including the next state, which evaluation (`key` is None)
            discards. If devices return different states, floating-point arrays are averaged; for other arrays, the
            maximum is used.
        library: The library of the module, such as "flax.linen", or "". Exports use the names of that library.
    """

    init: Callable[[Array], Params]
    loss: Callable[..., Any]
    predict: Callable[..., Array] | None = None
    name: str = "model"
    flops_per_row: float | None = None
    flops_of_length: Callable[[int], float] | None = None
    init_state: Callable[[Array], Any] | None = None
    library: str = ""


@dataclass(frozen=True, kw_only=True)
class BlockModel:
    """A model as embed / block / head, with equal blocks stacked on dim 0 of every leaf of `params["blocks"]`.

    Attributes:
        init: `init(key) -> {"embed": tree, "blocks": tree, "head": tree}`; every leaf of "blocks" has `num_blocks`
            as its first dim.
        embed: `embed(groups, batch, key) -> x`; `groups` has the groups of parameters listed in `embed_reads`.
        block: `block(block_params, x, key) -> x` for one block; leaves come without their first dim.
        head: `head(groups, x, batch, key) -> (sum, weight)`, with optional metrics, like the loss of a `Model`;
            `groups` has the groups listed in `head_reads`. In a model that is split, metrics are shares too.
        num_blocks: The number of stacked blocks.
        embed_reads: The groups that `embed` reads, out of "embed" and "head".
        head_reads: The groups that `head` reads; `("embed", "head")` if they share a table.
        scan_unroll: The number of blocks in one turn of the loop over blocks.
        predict: See `Model`.
        name: The name in reports.
        flops_per_row, flops_of_length: See `Model`.
        parallelize: `parallelize(parallel) -> model`: returns the model with its work split; raises UserError with
            everything that cannot be split. None: the model does not use a mesh, and XLA handles the axes inside it.
        rules: For a model that was split: regex of a parameter's path -> mesh axis (or None) of each of its dims.
        traffic: For a model that was split: `traffic(part, shapes, dtype, platform) -> Traffic` of the parts "embed",
            "block" and "head", given the per-device shapes of the batch, the compute dtype and the platform.
    """

    init: Callable[[Array], dict[str, Params]]
    embed: Callable[[dict[str, Params], Batch, Array | None], Activations]
    block: Callable[[Params, Activations, Array | None], Activations]
    head: Callable[[dict[str, Params], Activations, Batch, Array | None], Any]
    num_blocks: int
    embed_reads: tuple[str, ...] = ("embed",)
    head_reads: tuple[str, ...] = ("head",)
    scan_unroll: int = 1
    predict: Callable[[Params, Batch], Array] | None = None
    name: str = "block model"
    flops_per_row: float | None = None
    flops_of_length: Callable[[int], float] | None = None
    parallelize: Callable[[ParallelContext], "BlockModel"] | None = None
    rules: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    traffic: Callable[[str, AbstractBatch, str, str], Traffic] | None = None

    def loss(self, params: dict[str, Params], batch: Batch, key: Array | None) -> Any:
        """Computes the whole loss on one device, without gathering or recomputation: the reference for every
        strategy."""
        x = self.embed({name: params[name] for name in self.embed_reads}, batch, key)

        def body(x: Activations, layer: tuple[Params, Array]) -> tuple[Activations, None]:
            block_params, index = layer
            return self.block(block_params, x, fold_block(key, index)), None

        x, _ = lax.scan(body, x, (params["blocks"], jnp.arange(self.num_blocks)), unroll=self.scan_unroll)
        return self.head({name: params[name] for name in self.head_reads}, x, batch, key)


def has_state(model: Model | BlockModel) -> bool:
    """Returns whether a model has a state: arrays that gradients do not update."""
    return isinstance(model, Model) and model.init_state is not None


def with_state(model: Model | BlockModel, state: Any) -> Model | BlockModel:
    """Returns the model with a `predict` that uses this state."""
    if not isinstance(model, Model) or model.init_state is None or model.predict is None:
        return model
    predict = model.predict
    return replace(model, predict=lambda params, batch: predict(params, batch, state))


def fold_block(key: Array | None, index: Array) -> Array | None:
    """Returns the key of block `index` (a scalar), or None without randomness."""
    return None if key is None else jax.random.fold_in(key, index)


def without_predict(name: str, consequence: str, form: str) -> str:
    """Returns the error message for a model without the `predict` that is needed.

    Args:
        name: The name of the model.
        consequence: The consequence, such as "it cannot continue a prompt".
        form: The required signature: ROWS or LOGITS.
    """
    return (
        f"The model {name} does not define `predict`, so {consequence}. Give it one, `{form}`, as "
        f"Model(..., predict=predict); trained parameters remain valid. See {docs_url('models')}."
    )


def split_differentiable(x: Activations) -> tuple[list[Any], list[Any]]:
    """Separates the leaves of x, arrays or shapes, into floating-point ones and others (positions, indices)."""
    leaves = jax.tree.leaves(x)
    return list(filter(_has_gradient, leaves)), [leaf for leaf in leaves if not _has_gradient(leaf)]


def join_differentiable(like: Activations, differentiable: Iterable[Array], others: Iterable[Array]) -> Activations:
    """Reverses `split_differentiable`, for a tree like `like`."""
    leaves, treedef = jax.tree.flatten(like)
    differentiable, others = iter(differentiable), iter(others)
    return jax.tree.unflatten(treedef, [next(differentiable if _has_gradient(leaf) else others) for leaf in leaves])


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
