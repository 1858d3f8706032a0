"""What the runtime asks of a model: a pair of pure functions, or the same loss cut into embed, block and head.

Any `init` / `loss` pair trains (`Model`). A model written as embed / block / head (`BlockModel`) also lets the
runtime work one block at a time: gather a block's parameters just before its use, recompute it in backward, and
place blocks on pipeline stages. The functions hold no collectives and know nothing of a mesh: they see whole
parameters, already cast to the compute dtype, and the rows of the batch that live on one device.

A `BlockModel` with `parallelize` can also split its own work over the axes tensor, context and expert: its functions
then see their part of the parameters that `rules` split, run inside `shard_map`, and hold collectives. The rule they
keep: every device returns its own share of (sum, weight), and the shares of all devices add up to the whole.
"""

from collections.abc import Callable, Mapping
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
Activations: TypeAlias = Any
"""A pytree of arrays that flows from block to block."""
ROWS = "predict(params, batch) -> array with the rows of the batch on dim 0"
"""What `predict` has to be to predict rows of data."""
LOGITS = 'predict(params, batch) -> logits (1, L, vocabulary) for batch["inputs"], (1, L) token ids'
"""What it has to be to continue a prompt."""


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """What a model is told of the mesh. An argument, never an ambient global.

    Options, with sizes worked out, of the strategies that live inside a model; the default splits nothing.

    Attributes:
        tensor: products of matrices and positions between them, see `tensor.py`.
        context: positions of a row, see `context.py`.
        expert: experts of a mixture, see `expert.py`.
    """

    tensor: TensorConfig = field(default_factory=TensorConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)

    @property
    def splits_anything(self) -> bool:
        """Whether a model has any work to split."""
        return self.tensor.size * self.context.size * self.expert.size > 1

    @property
    def rings(self) -> tuple[str, ...]:
        """The options that send to neighbours, see `xla/neighbours.py`."""
        context, tensor = self.context, self.tensor
        attention = context.size > 1 and context.attention == "ring" and context.send == "pairs"
        products = tensor.size > 1 and tensor.collective_matmul
        named = {"strategy.context.attention=ring": attention, "strategy.tensor.collective_matmul": products}
        return tuple(name for name, used in named.items() if used)

    @property
    def splits_positions(self) -> bool:
        """Whether a device holds fewer positions than a row has."""
        return self.tensor.size * self.context.size > 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """Any model: two pure functions over a pytree of parameters.

    Attributes:
        init: `init(key) -> params`, traced under `jit` only, so no array is ever whole on one device.
        loss: `loss(params, batch, key) -> (sum, weight)`, two float scalars over the rows it is given: the weighted
            sum of the loss and the sum of the weights. The runtime divides once, by the weight of the whole global
            batch. `key` is the same on every device and None in evaluation; randomness that must not depend on the
            mesh folds in `batch["example"]`, the global index of each row. Metrics may follow the pair, see
            `loss_sums.py`. Rows that depend on each other ask for `batch_axes()`, see `row_axes.py`.
        predict: `predict(params, batch) -> array`, optional; `predict(params, batch, state)` of a model with a state.
        name: what reports call it.
        flops_per_row: floating-point operations of forward and backward for one row of the batch, for model FLOP/s.
        flops_of_length: `flops_of_length(length) -> flops_per_row` of rows of that many positions, where batches have
            several lengths; None: all rows count as `flops_per_row`.
        init_state: `init_state(key) -> state`, of a model that keeps arrays which no gradient moves, such as the
            running statistics of batch norm: a tree of arrays, whole on every device. Its loss is then
            `loss(params, batch, key, state) -> LossSums`, with the next state in it; in evaluation (`key` is None) that
            is not kept. Where devices return different ones, the next state is the mean over devices of floating-point
            arrays, and the largest of others.
        library: whose module it is, such as "flax.linen"; "" for a model of its own. Exports have that library's names.
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
    """A model as embed / block / head, its equal blocks stacked on dim 0 of every leaf of `params["blocks"]`.

    Attributes:
        init: `init(key) -> {"embed": tree, "blocks": tree, "head": tree}`; every leaf of "blocks" has `num_blocks`
            as its first dim.
        embed: `embed(groups, batch, key) -> x`; `groups` holds the groups of parameters named in `embed_reads`.
        block: `block(block_params, x, key) -> x` for one block; leaves come without their first dim.
        head: `head(groups, x, batch, key) -> (sum, weight)`, as a `Model`'s loss, with metrics or without; `groups` as
            in `head_reads`. In a model that is split, metrics are shares too.
        num_blocks: how many blocks are stacked.
        embed_reads: groups that `embed` reads, of "embed" and "head".
        head_reads: groups that `head` reads; `("embed", "head")` where they share a table.
        scan_unroll: how many blocks one turn of the loop over blocks holds.
        predict: as in `Model`.
        name: what reports call it.
        flops_per_row, flops_of_length: as in `Model`.
        parallelize: `parallelize(parallel) -> model`: the same model, its work split as told; raises UserError with
            all that cannot be split. None: the model knows of no mesh, and axes inside it are left to XLA.
        rules: of a model that was split: regex of a parameter's path -> mesh axis (or None) of each of its dims.
        traffic: of a model that was split: `traffic(part, shapes, dtype) -> Traffic` for the parts "embed", "block"
            and "head", given the per-device shapes of the batch and the compute dtype, with bytes as on the wire of
            an accelerator or, by the fourth argument, of that platform.
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
    traffic: Callable[[str, Mapping[str, jax.ShapeDtypeStruct], str, str], Traffic] | None = None

    def loss(self, params: dict[str, Params], batch: Batch, key: Array | None) -> Any:
        """The whole loss on one device, with nothing gathered or recomputed: the reference of every strategy."""
        x = self.embed({name: params[name] for name in self.embed_reads}, batch, key)

        def body(x: Activations, layer: tuple[Params, Array]) -> tuple[Activations, None]:
            block_params, index = layer
            return self.block(block_params, x, fold_block(key, index)), None

        x, _ = lax.scan(body, x, (params["blocks"], jnp.arange(self.num_blocks)), unroll=self.scan_unroll)
        return self.head({name: params[name] for name in self.head_reads}, x, batch, key)


def has_state(model: Model | BlockModel) -> bool:
    """Tells whether a model keeps arrays that no gradient moves."""
    return isinstance(model, Model) and model.init_state is not None


def with_state(model: Model | BlockModel, state: Any) -> Model | BlockModel:
    """The same model, whose `predict` needs no state: it is given this one."""
    if not isinstance(model, Model) or model.init_state is None or model.predict is None:
        return model
    predict = model.predict
    return replace(model, predict=lambda params, batch: predict(params, batch, state))


def fold_block(key: Array | None, index: Array) -> Array | None:
    """The key of block `index` (a scalar), or None where there is no randomness."""
    return None if key is None else jax.random.fold_in(key, index)


def without_predict(name: str, consequence: str, form: str) -> str:
    """What is told where a model has no `predict`, and one is needed.

    Args:
        name: Of the model.
        consequence: What cannot be, such as "it cannot continue a prompt".
        form: Of the function: ROWS or LOGITS.
    """
    return (
        f"The model {name} has no `predict`, so {consequence}. Give it one, `{form}`, as Model(..., predict=predict); "
        f"parameters that were trained stay as they are. See {docs_url('models')}."
    )
