"""Low-rank adaptation: a model's own matrices are frozen, and small ones beside them train.

    merged   W'[I, O] = W[I, O] + alpha / r * A[I, r] . B[r, O]           W frozen, A random, B zero at first
    forward  Out[.., O] = In[.., I] . W'[I, O]
    backward dA[I, r] = alpha / r * dW'[I, O] . B[r, O]^T,  dB[r, O] = alpha / r * A[I, r]^T . dW'[I, O]

1. A and B are in the same tree as their matrix: those of blocks/attention/query are blocks/lora/attention/query/a and
   .../b, stacked on dim 0 like it. So they are gathered, split, assigned to stages and saved like any parameter.
2. W' is computed in the block, from the device's part of W: if a model splits O, it splits that dim of B; if it splits
   I, that of A. Their product is then the device's part of A . B, without further communication.
3. Dims of a matrix before its last two count matrices (blocks, experts): each has its own A and B.
4. The model starts at exactly the loss of its base, because B is zero.

W' costs r multiplications for each of its elements. It takes the memory of one block's adapted matrices or, with
`train.remat: none`, of all blocks', which backward keeps.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1 (h = W x + B A x there, where
A has the rows that B has here).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..layouts.paths import in_blocks, leaves_with_paths, map_with_path, match_paths, matches, pattern_problem, some
from ..mesh.errors import UserError
from ..parallel.model import BlockModel, Model, ParallelContext, Params
from ..parallel.sharding.default_layout import model_axes
from ..parallel.sharding.model_errors import abstract_init, check_groups
from .frozen import without_gradients
from .layers import truncated_normal

NAME = "lora"
"""The name of the adapters within a group of parameters."""
BASE = "base"
"""The name of the parameters of a group that is not a dict, beside its adapters."""


class Group(NamedTuple):
    """The parameters of one tree: a group of a `BlockModel`, or all of a `Model`.

    Attributes:
        name: The group's name, "" for all parameters.
        is_dict: The parameters are a dict that can contain the adapters; otherwise they are put under `BASE`.
        stacked: Dim 0 counts blocks.
        adapted: Path within the group -> shape and dtype of the adapted matrix.
    """

    name: str
    is_dict: bool
    stacked: bool
    adapted: dict[str, jax.ShapeDtypeStruct]

    def full(self, path: str) -> str:
        """Returns the path of one of its parameters in the base model."""
        return f"{self.name}/{path}" if self.name else path


def group_of(name: str, tree: Params, adapted: Collection[str], *, stacked: bool) -> Group:
    """Returns the group of a tree of parameters.

    Args:
        name: The group's name, "" for all parameters.
        tree: The parameters, or their shapes.
        adapted: Paths in the base model of all adapted matrices, also of other groups.
        stacked: Dim 0 counts blocks.
    """
    group = Group(name, type(tree) is dict, stacked, {})
    found = {path: leaf for path, leaf in leaves_with_paths(tree) if group.full(path) in adapted}
    return group._replace(adapted=found)


def with_adapters(group: Group, tree: Params, rank: int, key: Array) -> Params:
    """Returns the parameters of a group with A and B of each adapted matrix."""
    if not group.adapted:
        return tree
    adapters: dict[str, Any] = {}
    for path, leaf in group.adapted.items():
        *parents, last = path.split("/")
        inner = adapters
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = {
            "a": _draw(group, path, leaf, rank, key),
            "b": jnp.zeros((*leaf.shape[:-2], rank, leaf.shape[-1]), jnp.float32),
        }
    return {**tree, NAME: adapters} if group.is_dict else {BASE: tree, NAME: adapters}


def _draw(group: Group, path: str, leaf: jax.ShapeDtypeStruct, rank: int, key: Array) -> Array:
    """Draws A, of deviation I ** -0.5; that of block n does not depend on the number of blocks."""
    shape, name = (*leaf.shape[:-1], rank), group.full(f"{NAME}/{path}/a")
    std = leaf.shape[-2] ** -0.5
    if not group.stacked:
        return truncated_normal(key, name, shape, std)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(shape[0]))
    return jax.vmap(lambda each: truncated_normal(each, name, shape[1:], std))(keys)


def merged(group: Group, tree: Params, *, scale: float) -> Params:
    """Returns the merged parameters of a group of the base model, for one block of stacked ones or for all."""
    if not group.adapted:
        return tree
    adapters = dict(leaves_with_paths(tree[NAME]))
    own = {name: value for name, value in tree.items() if name != NAME} if group.is_dict else tree[BASE]

    def merge(path: str, weight: Any) -> Any:
        if path not in group.adapted:
            return weight
        a, b = (jnp.asarray(adapters[f"{path}/{name}"]) for name in ("a", "b"))
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        product = jnp.matmul(a, b.astype(a.dtype), preferred_element_type=wide)
        return (weight.astype(wide) + scale * product.astype(wide)).astype(weight.dtype)

    return map_with_path(merge, own)


KEY = "model.lora"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank matrices that train in place of the model's own parameters (LoRA)."""

    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """The product of A and B is multiplied by alpha / rank."""
    match: tuple[str, ...] = ()
    """Regular expressions of the paths of the matrices to adapt, such as blocks/attention/.*; matching vectors are not
    adapted."""
    train: tuple[str, ...] = ()
    """Regular expressions of the model's own parameters that train too, such as head/.*"""

    def __post_init__(self) -> None:
        problems = []
        if self.rank < 1:
            problems.append(f"{KEY}.rank={self.rank} must be at least 1.")
        if not 0 < self.alpha < math.inf:
            problems.append(f"{KEY}.alpha={self.alpha} must be over 0 and finite.")
        if not self.match:
            problems.append(f"{KEY}.match is empty: give the matrices to adapt, such as [blocks/attention/.*].")
        for name in ("match", "train"):
            problems += [f"{KEY}.{name}: {error}" for error in map(pattern_problem, getattr(self, name)) if error]
        if problems:
            raise UserError("\n".join(problems))

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / self.rank


class LoRA:
    """A model with low-rank matrices beside its own.

    Attributes:
        base: The model without them.
        config: The adapted matrices and their rank.
        model: The model that trains; its parameters are those of `base` and the adapters.
        frozen: Paths of the parameters of `model` that do not train, for the optimizer.
    """

    def __init__(self, base: Model | BlockModel, config: LoRAConfig) -> None:
        """Adds adapters to a model, without making arrays.

        Args:
            base: A model.
            config: The adapted matrices and their rank.

        Raises:
            UserError: An expression does not match any parameter, or only vectors; the model already has adapters; a
                matrix is both adapted and trained.
        """
        self.base, self.config = base, config
        params = abstract_init(base)
        check_groups(base, params)
        self._groups = _groups(base, params, config)
        wrapped = self._wrapped_blocks(base) if isinstance(base, BlockModel) else self._wrapped(base)
        params = abstract_init(wrapped)
        self.frozen = _frozen(config, params)
        self.model: Model | BlockModel = without_gradients(wrapped, self.frozen, params)

    def start(self, params: Params, key: Array) -> Params:
        """Returns the initial parameters of the model that trains, from those of the base.

        Args:
            params: Parameters of `base`, usually trained: arrays, or NumPy arrays on the host.
            key: The key of the random matrices A.

        Returns:
            Parameters of `model`: the same arrays, and A and B in float32.
        """
        return self._each(params, lambda group, tree: with_adapters(group, tree, self.config.rank, key))

    def merge(self, params: Params) -> Params:
        """Returns parameters of the base with the adapters merged, for an export.

        Args:
            params: Parameters of `model`.

        Returns:
            Parameters of `base`: each adapted matrix is W + alpha / rank * A B, in W's dtype.
        """
        return self._each(params, partial(merged, scale=self.config.scale))

    def _each(self, params: Params, change: Callable[[Group, Params], Params]) -> Params:
        """Applies a function to each group of the given parameters."""
        if "" in self._groups:
            return change(self._groups[""], params)
        return {name: change(self._groups[name], tree) for name, tree in params.items()}

    def _wrapped(self, base: Model) -> Model:
        return replace(
            base,
            init=self._drawn(base.init),
            loss=self._on_merged(base.loss),
            predict=base.predict and self._on_merged(base.predict),
        )

    def _wrapped_blocks(self, base: BlockModel) -> BlockModel:
        parallelize = base.parallelize

        @wraps(base.block)
        def block(params: Params, *arguments: Any) -> Any:
            return base.block(merged(self._groups["blocks"], params, scale=self.config.scale), *arguments)

        def split(parallel: ParallelContext) -> BlockModel:
            assert parallelize is not None
            model = LoRA(parallelize(parallel), self.config).model
            assert isinstance(model, BlockModel)
            return model

        return replace(
            base,
            init=self._drawn(base.init),
            embed=self._on_merged(base.embed),
            block=block,
            head=self._on_merged(base.head),
            predict=base.predict and self._on_merged(base.predict),
            parallelize=parallelize and split,
            rules={**self._rules(base), **base.rules},
        )

    def _drawn(self, init: Callable[[Array], Params]) -> Callable[[Array], Params]:
        @wraps(init)
        def call(key: Array) -> Params:
            return self.start(init(key), key)

        return call

    def _on_merged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of the wrapped model's parameters from one of the base's."""

        @wraps(function)
        def call(params: Params, *arguments: Any) -> Any:
            return function(self.merge(params), *arguments)

        return call

    def _rules(self, base: BlockModel) -> dict[str, tuple[str | None, ...]]:
        """Returns the layout rules: a device holds the rows of A and columns of B that make its part of a matrix."""
        rules: dict[str, tuple[str | None, ...]] = {}
        for group in self._groups.values() if base.rules else ():
            for path in group.adapted:
                axes = model_axes(base, group.full(path))
                adapter = re.escape(group.full(f"{NAME}/{path}"))
                rules[f"{adapter}/a"] = (*axes[:-1], None) if axes else ()
                rules[f"{adapter}/b"] = (*axes[:-2], None, axes[-1]) if axes else ()
        return rules


def frozen_by_lora(spec: Mapping[str, Any], abstract_params: Params) -> frozenset[str]:
    """Returns the paths of the parameters that adapters freeze.

    Args:
        spec: The `model:` section; none are frozen without `lora`.
        abstract_params: The shapes of the parameters of the model that trains.

    Raises:
        UserError: An expression of `model.lora.train` does not match any parameter.
    """
    config = lora_config(spec)
    return frozenset() if config is None else _frozen(config, abstract_params)


def lora_config(spec: Mapping[str, Any]) -> LoRAConfig | None:
    """Returns the options of the adapters of a `model:` section, if any."""
    given = spec.get("lora")
    return LoRAConfig(**given) if given and not isinstance(given, LoRAConfig) else given or None


def _frozen(config: LoRAConfig, abstract_params: Params) -> frozenset[str]:
    paths = [path for path, _ in leaves_with_paths(abstract_params) if NAME not in path.split("/")]
    trained = {path for found in match_paths(config.train, paths, f"{KEY}.train").values() for path in found}
    return frozenset(paths) - trained


def _groups(base: Model | BlockModel, params: Params, config: LoRAConfig) -> dict[str, Group]:
    """Returns the trees that contain adapters, by name."""
    leaves = dict(leaves_with_paths(params))
    taken = [path for path in leaves if NAME in path.split("/")]
    if taken:
        raise UserError(
            f"{KEY}: model {base.name!r} already has parameters of that name ({some(taken)}). Rename them, or leave "
            f"{KEY} out: for a model with its own adapters, use optimizer.freeze."
        )
    blocks = isinstance(base, BlockModel)
    met = match_paths(config.match, list(leaves), f"{KEY}.match")
    is_matrix = {path: len(leaf.shape) - (blocks and in_blocks(path)) >= 2 for path, leaf in leaves.items()}
    problems = [
        f"{KEY}.match: {pattern!r} does not match any matrix, only {some(found)} of shape "
        f"{list(leaves[found[0]].shape)}. Give parameters with at least two dims, without that of the blocks."
        for pattern, found in met.items()
        if not any(is_matrix[path] for path in found)
    ]
    adapted = {path for found in met.values() for path in found if is_matrix[path]}
    sizes = {path: min(leaves[path].shape[-2:]) for path in sorted(adapted)}
    small = [path for path in sizes if sizes[path] < config.rank]
    if small:
        problems.append(
            f"{KEY}.rank={config.rank} is too large for {some(small)} of shape {list(leaves[small[0]].shape)}: both "
            f"last dims must be at least the rank. Set {KEY}.rank to at most "
            f"{min(sizes.values())}, or narrow {KEY}.match."
        )
    both = [path for path in adapted if any(matches(pattern, path) for pattern in config.train)]
    if both:
        problems.append(f"{KEY}: {some(sorted(both))} is both in match and in train. Remove it from one.")
    if problems:
        raise UserError("\n".join(problems))
    trees = params if blocks else {"": params}
    return {name: group_of(name, tree, adapted, stacked=blocks and name == "blocks") for name, tree in trees.items()}
