"""Low-rank adaptation: a model's own matrices stay as they are, and small ones beside them train.

    merged   W'[I, O] = W[I, O] + alpha / r * A[I, r] . B[r, O]           W frozen, A random, B zero at first
    forward  Out[.., O] = In[.., I] . W'[I, O]
    backward dA[I, r] = alpha / r * dW'[I, O] . B[r, O]^T,  dB[r, O] = alpha / r * A[I, r]^T . dW'[I, O]

1. A and B stand beside what they adapt: those of blocks/attention/query are blocks/lora/attention/query/a and .../b,
   stacked on dim 0 like it. So they are gathered, split, dealt out to stages and saved as any parameter is.
2. W' is made where the block runs, of what the device holds of W: where a model splits O, it splits that dim of B;
   where it splits I, that of A. Their product is then the device's part of A . B, and nothing more is sent.
3. Dims of a matrix before its last two count matrices (blocks, experts): each has an A and a B of its own.
4. The model starts at the loss of its base, exactly, since B is zero.

W' costs r multiplications for each of its elements, and is made for whole matrices: the memory of one block's, and
under `train.remat: none` that of all blocks' adapted matrices, which backward keeps.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1 (h = W x + B A x there, where
A has the rows that B has here).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

from jax import Array

from ..layouts.path_patterns import meets, paths_met, pattern_problem, some
from ..layouts.paths import in_blocks, leaves_with_paths
from ..mesh.errors import UserError
from ..parallel.model import BlockModel, Model, ParallelContext, Params
from ..parallel.sharding.default_layout import model_axes
from ..parallel.sharding.model_errors import abstract_init, check_groups
from .frozen import without_gradients
from .layers.low_rank import NAME, Group, group_of, merged, with_adapters

KEY = "model.lora"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank matrices that train in place of the model's own parameters (LoRA)."""

    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """The product of A and B is multiplied by alpha / rank."""
    match: tuple[str, ...] = ()
    """Regular expressions of the paths of the matrices that are adapted, such as blocks/attention/.*; vectors that they
    match as well stay as they are."""
    train: tuple[str, ...] = ()
    """Regular expressions of parameters of the model itself that train all the same, such as head/.*"""

    def __post_init__(self) -> None:
        problems = []
        if self.rank < 1:
            problems.append(f"{KEY}.rank={self.rank} has to be at least 1.")
        if not 0 < self.alpha < math.inf:
            problems.append(f"{KEY}.alpha={self.alpha} has to be over 0, and finite.")
        if not self.match:
            problems.append(f"{KEY}.match is empty: name the matrices that are adapted, such as [blocks/attention/.*].")
        for name in ("match", "train"):
            problems += [f"{KEY}.{name}: {error}" for error in map(pattern_problem, getattr(self, name)) if error]
        if problems:
            raise UserError("\n".join(problems))

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.alpha / self.rank


class LoRA:
    """A model with low-rank matrices beside its own.

    Attributes:
        base: the model without them.
        config: which matrices, and how large.
        model: the model that trains; its parameters are those of `base` and the adapters.
        frozen: paths of the parameters of `model` that do not train, for the optimizer.
    """

    def __init__(self, base: Model | BlockModel, config: LoRAConfig) -> None:
        """Adds adapters to a model; no array is made.

        Args:
            base: Any model.
            config: Which matrices are adapted.

        Raises:
            UserError: An expression matches no parameter, or vectors alone; the model has adapters already; a matrix
                is adapted and trains by itself too.
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
        """The first parameters of the model that trains, from those of the base.

        Args:
            params: Parameters of `base`, usually trained ones: arrays, or NumPy's on the host.
            key: Of the random matrices A.

        Returns:
            Parameters of `model`: the same arrays, and A and B in float32.
        """
        return self._each(params, lambda group, tree: with_adapters(group, tree, self.config.rank, key))

    def merge(self, params: Params) -> Params:
        """Parameters of the base that compute what the model that trains does, to be exported.

        Args:
            params: Parameters of `model`.

        Returns:
            Parameters of `base`: each adapted matrix is W + alpha / rank * A B, in W's dtype; the others as they are.
        """
        return self._each(params, partial(merged, scale=self.config.scale))

    def _each(self, params: Params, change: Callable[[Group, Params], Params]) -> Params:
        """Changes each group of some of the parameters."""
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
        """A function of some groups of the base's parameters as one of the wrapped model's."""

        @wraps(function)
        def call(params: Params, *arguments: Any) -> Any:
            return function(self.merge(params), *arguments)

        return call

    def _rules(self, base: BlockModel) -> dict[str, tuple[str | None, ...]]:
        """Where a device holds a part of a matrix, it holds the rows of A and the columns of B that make this part."""
        rules: dict[str, tuple[str | None, ...]] = {}
        for group in self._groups.values() if base.rules else ():
            for path in group.adapted:
                axes = model_axes(base, group.full(path))
                beside = re.escape(group.full(f"{NAME}/{path}"))
                rules[f"{beside}/a"] = (*axes[:-1], None) if axes else ()
                rules[f"{beside}/b"] = (*axes[:-2], None, axes[-1]) if axes else ()
        return rules


def frozen_by_lora(spec: Mapping[str, Any], abstract_params: Params) -> frozenset[str]:
    """The parameters that do not train because adapters do.

    Args:
        spec: The `model:` section; without `lora` nothing is frozen.
        abstract_params: Shapes of the parameters of the model that trains.

    Returns:
        Paths.

    Raises:
        UserError: An expression of `model.lora.train` matches no parameter.
    """
    config = lora_config(spec)
    return frozenset() if config is None else _frozen(config, abstract_params)


def lora_config(spec: Mapping[str, Any]) -> LoRAConfig | None:
    """The options of the adapters of a `model:` section; None where it has none."""
    given = spec.get("lora")
    return LoRAConfig(**given) if given and not isinstance(given, LoRAConfig) else given or None


def _frozen(config: LoRAConfig, abstract_params: Params) -> frozenset[str]:
    paths = [path for path, _ in leaves_with_paths(abstract_params) if NAME not in path.split("/")]
    trained = {path for found in paths_met(config.train, paths, f"{KEY}.train").values() for path in found}
    return frozenset(paths) - trained


def _groups(base: Model | BlockModel, params: Params, config: LoRAConfig) -> dict[str, Group]:
    """The trees that adapters stand in, by name."""
    leaves = dict(leaves_with_paths(params))
    taken = [path for path in leaves if NAME in path.split("/")]
    if taken:
        raise UserError(
            f"{KEY}: model {base.name!r} has parameters of that name itself ({some(taken)}). Rename them, or leave "
            f"{KEY} out: matrices that a model adds by itself train under optimizer.freeze."
        )
    blocks = isinstance(base, BlockModel)
    met = paths_met(config.match, list(leaves), f"{KEY}.match")
    is_matrix = {path: len(leaf.shape) - (blocks and in_blocks(path)) >= 2 for path, leaf in leaves.items()}
    problems = [
        f"{KEY}.match: {pattern!r} matches no matrix, but {some(found)} of shape {list(leaves[found[0]].shape)}. Name "
        "parameters with two dims or more, that of the blocks not counted."
        for pattern, found in met.items()
        if not any(is_matrix[path] for path in found)
    ]
    adapted = {path for found in met.values() for path in found if is_matrix[path]}
    sizes = {path: min(leaves[path].shape[-2:]) for path in sorted(adapted)}
    small = [path for path in sizes if sizes[path] < config.rank]
    if small:
        problems.append(
            f"{KEY}.rank={config.rank} is more than {some(small)} of shape {list(leaves[small[0]].shape)} can have: a "
            f"product of this rank needs both of its last dims to be at least as large. Set {KEY}.rank to at most "
            f"{min(sizes.values())}, or narrow {KEY}.match."
        )
    both = [path for path in adapted if any(meets(pattern, path) for pattern in config.train)]
    if both:
        problems.append(f"{KEY}: {some(sorted(both))} is in match and in train: it is adapted, or it trains. Keep one.")
    if problems:
        raise UserError("\n".join(problems))
    trees = params if blocks else {"": params}
    return {name: group_of(name, tree, adapted, stacked=blocks and name == "blocks") for name, tree in trees.items()}
