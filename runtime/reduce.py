"""Reduces a config for verification: fewer rows, positions and layers, narrower, with smaller tables.

Sizes become smaller and keep their divisors: a dim that the mesh's sizes divide is still divided by them, and one that
they do not divide still is not. Dims of 128 or more stay so for adafactor, which factors only these, and for the user's
own optimizer. Each reduction is tried; if a strategy rejects it, a weaker one is used.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import jax

from ..configs.checks import axis_sizes, elastic_axes, resolved_sizes
from ..configs.config_text import as_plain
from ..configs.schema import Config
from ..data.splits import Splits, open_splits
from ..layouts.paths import flatten_mapping, in_blocks, leaves_with_paths
from ..mesh.axes import divisors
from ..models.catalog import MODELS
from ..parallel.model import BlockModel
from ..parallel.options import Precision
from ..parallel.sharding.lay_out import abstract_parameters
from ..parallel.verification.diagnosis import explain_rejection
from .build_run import Built, build, configured_model

MIN_LENGTH, MIN_LAYERS, MIN_WIDTH, MIN_HEAD, MIN_VOCABULARY = 8, 2, 16, 4, 256
TOKENS = ("inputs", "targets")
FACTORED = 128
"""Adafactor factors a matrix if two of its dims have at least this many elements."""
MAX_CLIP_NORM = 1e-3
"""A norm that the gradients of a model that learns exceed, so that clipping is active."""


class Reduced(NamedTuple):
    """A smaller config to verify.

    Attributes:
        config: The smaller config.
        splits: Its examples.
        changes: Config key -> (before, after).
    """

    config: Config
    splits: Splits
    changes: Mapping[str, tuple[Any, Any]] = {}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The parameters of its model: path -> shape and dtype."""
        model = configured_model(self.config, self.splits)
        return dict(leaves_with_paths(abstract_parameters(model, self.config.precision)))


def reduce_config(config: Config, precision: Precision, devices: list[str]) -> Reduced:
    """Finds the smallest config of the same structure that the strategy accepts.

    Args:
        config: The run's configuration; it is built first, so that its own errors come first.
        precision: The dtypes of the smaller config.
        devices: Names of the devices of the mesh.

    Raises:
        UserError: The given config is invalid.
    """
    sizes = resolved_sizes(axis_sizes(config.strategy), len(devices))
    inside = prod(size for axis, size in sizes.items() if axis not in elastic_axes())
    length = min(config.data.length, -(-MIN_LENGTH // (2 * inside)) * 2 * inside)
    data, folders = replace(config.data, length=length), config.run.search_path
    splits = open_splits(data, folders, config.train.global_batch)
    original = build(config, splits=splits, devices=devices)
    given = Reduced(replace(config, precision=precision), splits)
    config = replace(given.config, data=data) if splits.vocabulary else given.config
    for options in _smaller_models(given, sizes):
        folded = _fold_vocabulary(splits, options, config.train.global_batch)
        smaller = Reduced(replace(config, model=options), folded)
        for rows in divisors(config.train.global_batch):
            train = replace(config.train, global_batch=rows, clip_norm=min(config.train.clip_norm, MAX_CLIP_NORM))
            candidate = smaller._replace(config=replace(smaller.config, train=train))
            strategy = _lower_floors(candidate, original)
            candidate = candidate._replace(config=replace(candidate.config, strategy=strategy))
            if _works(candidate, devices):
                return candidate._replace(changes=_changes(given, candidate))
    return Reduced(given.config, open_splits(given.config.data, folders, given.config.train.global_batch))


def _works(candidate: Reduced, devices: list[str]) -> bool:
    """Returns True if the step can be built and traced; errors that verification explains are allowed."""
    try:
        built = build(candidate.config, splits=candidate.splits, devices=devices)
    except (ValueError, TypeError):
        return False
    try:
        jax.eval_shape(built.step.gradients, built.step.abstract_state(), built.batch)
    except (ValueError, TypeError) as error:
        return explain_rejection(error, built.layouts) is not None
    return True


def _smaller_models(given: Reduced, sizes: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
    """Yields options of the model, the smallest first; the user's own model keeps its options."""
    model = given.config.model
    if model["name"] in MODELS:
        smaller = _smaller_model(given, sizes)
        yield smaller
        if "layers" in smaller:
            yield {**smaller, "layers": model["layers"]}
    yield model


def _smaller_model(given: Reduced, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns options of a reference model with smaller sizes that keep their divisors."""
    options = dict(given.config.model)
    own = {name: value for name, value in options.items() if name not in ("name", "check", "lora")}
    known: Any = MODELS[options["name"]][0](**own)
    devices, inside = prod(sizes.values()), prod(size for axis, size in sizes.items() if axis not in elastic_axes())
    pipe = given.config.strategy.get("pipe")
    virtual_stages = getattr(pipe, "size", 1) * (getattr(pipe, "virtual", None) or 1)
    factors = any(name == "adafactor" or ":" in name for name in given.config.optimizer.names)
    least = partial(_min_width, factors)
    smaller: dict[str, Any] = {}
    if "heads" in options:
        smaller = _smaller_heads(known, devices, inside, least)
    if "layers" in options:
        smaller["layers"] = shrink(known.layers, virtual_stages, max(MIN_LAYERS, virtual_stages))
    if "mlp_width" in options:
        smaller["mlp_width"] = shrink(known.mlp_size, devices, least(known.mlp_size))
    if "vocabulary" in options:
        smaller["vocabulary"] = shrink(known.vocabulary or given.splits.vocabulary or 0, devices, MIN_VOCABULARY)
    if "widths" in options:
        smaller["widths"] = tuple(shrink(each, devices, least(each)) for each in known.widths)
    return {**options, **smaller}


def _min_width(factors: bool, size: int, least: int = MIN_WIDTH) -> int:
    """Returns the minimum of a width; an optimizer that factors a matrix must still factor the smaller one."""
    return FACTORED if factors and size >= FACTORED else least


def _smaller_heads(known: Any, devices: int, inside: int, least: Callable[..., int]) -> dict[str, int]:
    """Returns fewer and narrower heads: as many queries per key, and all widths divisible as before."""
    kv_heads = shrink(known.num_kv_heads, inside, min(2, known.num_kv_heads))
    heads = kv_heads * (known.heads // known.num_kv_heads)
    widths = [(number * known.head_size, few) for number, few in ((known.heads, heads), (known.num_kv_heads, kv_heads))]
    fitting = (
        size
        for size in range(MIN_HEAD, known.head_size, 2)
        if all(_alike(few * size, width, devices) and few * size >= least(width, 0) for width, few in widths)
    )
    size = next(fitting, known.head_size)
    follows = known.heads * known.head_size == known.width
    width = heads * size if follows else shrink(known.width, devices, least(known.width))
    head_width = {"head_width": size} if known.head_width else {}
    return {"heads": heads, "kv_heads": kv_heads if known.kv_heads else 0, "width": width, **head_width}


def shrink(number: int, modulus: int, least: int) -> int:
    """Returns the smallest number from `least` on with the same divisors in common with `modulus`; at most `number`.

    Args:
        number: A size.
        modulus: The product of the mesh's sizes that may split it.
        least: The first number to try.
    """
    return next((each for each in range(max(least, 1), number) if _alike(each, number, modulus)), number)


def _alike(size: int, other: int, modulus: int) -> bool:
    return gcd(size, modulus) == gcd(other, modulus)


def _lower_floors(candidate: Reduced, original: Built) -> dict[str, Any]:
    """Returns the strategy with floors so low that the parameters that the original splits are still split."""
    shapes = candidate.shapes
    strategy = dict(candidate.config.strategy)
    for axis, options in candidate.config.strategy.items():
        if hasattr(options, "floor_bytes"):
            floor = min([options.floor_bytes, *_split_sizes(axis, original, shapes)])
            strategy[axis] = replace(options, floor_bytes=floor)
    return strategy


def _split_sizes(axis: str, original: Built, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[int]:
    """Yields the bytes of one block's part, in the smaller model, of each parameter that the original splits."""
    layouts = original.layouts
    for row in layouts.update_table.rows:
        if axis in row.layout.used_axes and row.path in shapes:
            leaf = shapes[row.path]
            first = 1 if isinstance(original.model, BlockModel) and in_blocks(row.path) else 0
            parts = prod(layouts.mesh.axis_size(other) for other in row.layout.used_axes if other != axis)
            yield prod(leaf.shape[first:]) * leaf.dtype.itemsize // parts


def _fold_vocabulary(splits: Splits, options: Mapping[str, Any], rows: int) -> Splits:
    """Returns the first examples with token ids modulo a smaller vocabulary, if the model has one; else the splits."""
    vocabulary = options.get("vocabulary", 0) if options["name"] in MODELS else 0
    if not vocabulary or not splits.vocabulary or vocabulary >= splits.vocabulary:
        return splits
    examples = (splits.train[index] for index in range(min(rows, len(splits.train))))
    folded = [{name: each % vocabulary if name in TOKENS else each for name, each in row.items()} for row in examples]
    return splits._replace(train=folded, evaluation=None, vocabulary=vocabulary)


def _changes(given: Reduced, reduced: Reduced) -> dict[str, tuple[Any, Any]]:
    """Returns the reduced keys; a vocabulary that follows from the data is that of the data."""
    before, after = (flatten_mapping(as_plain(each.config)) for each in (given, reduced))
    before["model.vocabulary"] = before.get("model.vocabulary") or given.splits.vocabulary
    after["model.vocabulary"] = after.get("model.vocabulary") or given.splits.vocabulary
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}
