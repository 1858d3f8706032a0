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

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from annotated_types import Ge
from jax import Array

from ..layouts.paths import in_blocks, leaves_with_paths, map_with_path, match_paths, nest, pattern_problem, some
from ..mesh.errors import UserError, raise_problems
from ..parallel.model import BlockModel, Model, Params
from ..parallel.options import PositiveFloat32, type_problems
from ..parallel.sharding.default_layout import model_axes
from ..parallel.sharding.model_errors import abstract_init, check_groups
from .frozen import with_params, without_gradients
from .layers import truncated_normal

NAME = "lora"
"""The name of the adapters within a group of parameters."""
KEY = "model.lora"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank matrices that train in place of the model's own parameters (LoRA)."""

    rank: Annotated[int, Ge(1)] = 8
    """Columns of A and rows of B."""
    alpha: PositiveFloat32 = 16.0
    """The product of A and B is multiplied by alpha / rank."""
    match: tuple[str, ...] = ()
    """Regular expressions of the paths of the matrices to adapt, such as blocks/attention/.*; matching vectors are not
    adapted."""
    train: tuple[str, ...] = ()
    """Regular expressions of the model's own parameters that train too, such as head/.*"""

    def __post_init__(self) -> None:
        problems = type_problems(KEY, self)
        if not problems and not self.match:
            problems = [f"{KEY}.match is empty: give the matrices to adapt, such as [blocks/attention/.*]."]
        if not problems:
            patterns = [("match", each) for each in self.match] + [("train", each) for each in self.train]
            problems = [f"{KEY}.{name}: {error}" for name, each in patterns if (error := pattern_problem(each))]
        raise_problems(problems)

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
        """Group of parameters, "" for all of a `Model` -> path within it of each adapted matrix -> its shape."""
        wrapped = self._wrapped(base)
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
        return self._each(params, partial(self._with_adapters, key))

    def merge(self, params: Params) -> Params:
        """Returns parameters of the base with the adapters merged, for an export.

        Args:
            params: Parameters of `model`.

        Returns:
            Parameters of `base`: each adapted matrix is W + alpha / rank * A B, in W's dtype.
        """
        return self._each(params, self._merged)

    def _each(self, params: Params, change: Callable[[str, Params], Params]) -> Params:
        """Applies a function to the name and the tree of each group that has adapters."""
        if "" in self._groups:
            return change("", params)
        return {name: change(name, tree) if name in self._groups else tree for name, tree in params.items()}

    def _with_adapters(self, key: Array, group: str, tree: Params) -> Params:
        """Returns the parameters of a group with A and B of each adapted matrix."""
        adapters: dict[str, Any] = {}
        for path, leaf in self._groups[group].items():
            adapters[f"{path}/a"] = self._draw(key, group, path, leaf)
            adapters[f"{path}/b"] = jnp.zeros((*leaf.shape[:-2], self.config.rank, leaf.shape[-1]), jnp.float32)
        return {**tree, NAME: nest(adapters)}

    def _draw(self, key: Array, group: str, path: str, leaf: jax.ShapeDtypeStruct) -> Array:
        """Draws A, of deviation I ** -0.5; that of block n does not depend on the number of blocks."""
        shape, name = (*leaf.shape[:-1], self.config.rank), _below(group, f"{NAME}/{path}/a")
        std = leaf.shape[-2] ** -0.5
        if group != "blocks":
            return truncated_normal(key, name, shape, std)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(shape[0]))
        return jax.vmap(lambda each: truncated_normal(each, name, shape[1:], std))(keys)

    def _merged(self, group: str, tree: Params) -> Params:
        """Returns the merged parameters of a group of the base model, for one block of stacked ones or for all."""
        if group not in self._groups:
            return tree
        adapters = dict(leaves_with_paths(tree[NAME]))

        def merge(path: str, weight: Any) -> Any:
            if path not in self._groups[group]:
                return weight
            a, b = (jnp.asarray(adapters[f"{path}/{name}"]) for name in ("a", "b"))
            wide = jnp.promote_types(weight.dtype, jnp.float32)
            product = jnp.matmul(a, b.astype(a.dtype), preferred_element_type=wide)
            return (weight.astype(wide) + self.config.scale * product.astype(wide)).astype(weight.dtype)

        return map_with_path(merge, {name: value for name, value in tree.items() if name != NAME})

    def _wrapped(self, base: Model | BlockModel) -> Model | BlockModel:
        """Returns the model of the base's parameters and adapters; each function merges what it reads."""
        functions = ("embed", "head", "predict") if isinstance(base, BlockModel) else ("loss", "predict")
        changed: dict[str, Any] = {
            name: with_params(function, self.merge) for name in functions if (function := getattr(base, name))
        }
        changed["init"] = wraps(base.init)(lambda key: self.start(base.init(key), key))
        if not isinstance(base, BlockModel):
            return replace(base, **changed)
        changed["block"] = with_params(base.block, partial(self._merged, "blocks"))
        changed["rules"] = {**self._rules(base), **base.rules}
        if parallelize := base.parallelize:
            changed["parallelize"] = lambda parallel: LoRA(parallelize(parallel), self.config).model
        return replace(base, **changed)

    def _rules(self, base: BlockModel) -> dict[str, tuple[str | None, ...]]:
        """Returns the layout rules: a device holds the rows of A and columns of B that make its part of a matrix."""
        rules: dict[str, tuple[str | None, ...]] = {}
        for group, adapted in self._groups.items() if base.rules else ():
            for path in adapted:
                axes = model_axes(base, _below(group, path))
                adapter = re.escape(_below(group, f"{NAME}/{path}"))
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
    return frozenset(paths).difference(*match_paths(config.train, paths, f"{KEY}.train").values())


def _below(group: str, path: str) -> str:
    return f"{group}/{path}" if group else path


def _groups(base: Model | BlockModel, params: Params, config: LoRAConfig) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the adapted matrices by their paths within each group that has some.

    Raises:
        UserError: The expressions do not fit the parameters; all problems at once.
    """
    leaves = dict(leaves_with_paths(params))
    taken = [path for path in leaves if NAME in path.split("/")]
    if taken:
        raise UserError(
            f"{KEY}: model {base.name!r} already has parameters of that name ({some(taken)}). Rename them, or leave "
            f"{KEY} out: for a model with its own adapters, use optimizer.freeze."
        )
    blocks = isinstance(base, BlockModel)
    matched = match_paths(config.match, list(leaves), f"{KEY}.match")
    is_matrix = {path: len(leaf.shape) - (blocks and in_blocks(path)) >= 2 for path, leaf in leaves.items()}
    problems = [
        f"{KEY}.match: {pattern!r} does not match any matrix, only {some(found)} of shape "
        f"{list(leaves[found[0]].shape)}. Give parameters with at least two dims, without that of the blocks."
        for pattern, found in matched.items()
        if not any(is_matrix[path] for path in found)
    ]
    adapted = sorted({path for found in matched.values() for path in found if is_matrix[path]})
    sizes = {path: min(leaves[path].shape[-2:]) for path in adapted}
    small = [path for path in sizes if sizes[path] < config.rank]
    if small:
        problems.append(
            f"{KEY}.rank={config.rank} is too large for {some(small)} of shape {list(leaves[small[0]].shape)}: both "
            f"last dims must be at least the rank. Set {KEY}.rank to at most "
            f"{min(sizes.values())}, or narrow {KEY}.match."
        )
    if both := set(adapted) - _frozen(config, params):
        problems.append(f"{KEY}: {some(sorted(both))} is both in match and in train. Remove it from one.")
    groups: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for path in adapted:
        group, _, own = path.partition("/") if blocks else ("", "", path)
        groups.setdefault(group, {})[own] = leaves[path]
    for group in groups:
        tree = params[group] if group else params
        if type(tree) is not dict:
            problems.append(
                f"{KEY}: the parameters {group or 'of the model'} must be a dict to contain adapters, got a "
                f"{type(tree).__name__}."
            )
    raise_problems(problems)
    return groups
