"""A smaller config of the same structure, for verification: fewer rows, positions, layers, narrower, smaller tables.

Sizes become smaller and keep what divides them: a dim that the mesh's sizes divide is still divided by them, and one
that they do not divide is still not. What the optimizer does stays the same too: dims of 128 or more stay so where
adafactor or the user's own optimizer decides by them, and the longer dim of a matrix stays the longer one for muon.
Each reduction is tried; where a strategy refuses it, a weaker one is taken.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import jax
import numpy as np

from ...configs.checks import axis_sizes, resolved_sizes
from ...configs.schema import Config
from ...data.ordering.order import source_order
from ...data.source import Source, take
from ...data.splits import Splits, open_splits
from ...layouts.paths import in_blocks, leaves_with_paths
from ...models.catalog import MODELS
from ...parallel.model import BlockModel
from ...parallel.precision import Precision
from ...parallel.sharding.lay_out import abstract_parameters
from ...parallel.sharding.strategies import axes_that_split
from ...parallel.verification.diagnosis import refused
from .build import Built, build, configured_model, search_path

LEAST_LENGTH, LEAST_LAYERS, LEAST_WIDTH, LEAST_HEAD, LEAST_VOCABULARY = 8, 2, 16, 4, 256
TOKENS = ("inputs", "targets")
FACTORED = 128
"""Adafactor treats a matrix as one where two of its dims have this many elements, and each element alone otherwise."""
LEFT_TO_ADAM = ("embed", "head")
"""Groups of parameters that muon leaves to adam."""
LEAST_CLIP_NORM = 1e-3
"""A norm that gradients of a model that learns are over: so clipping is at work."""


class Reduced(NamedTuple):
    """What is verified.

    Attributes:
        config: the smaller config.
        splits: its examples.
        changes: config key -> (before, after).
    """

    config: Config
    splits: Splits
    changes: dict[str, tuple[Any, Any]]


def reduce_config(config: Config, precision: Precision, devices: list[str]) -> Reduced:
    """Finds the smallest config of the same structure that the strategy accepts.

    Args:
        config: A config; it is built first, so that one that cannot work is told as such.
        precision: What the smaller one computes in.
        devices: Names of the devices of the mesh.

    Raises:
        UserError: The config as it is given does not work out.
    """
    sizes = resolved_sizes(axis_sizes(config), len(devices))
    inside = prod(size for axis, size in sizes.items() if axis not in _over_rows())
    length = min(config.data.length, -(-LEAST_LENGTH // (2 * inside)) * 2 * inside)
    data = replace(config.data, length=length)
    splits = open_splits(data, search_path(config))
    original = build(config, splits=splits, devices=devices)
    config = replace(config, precision=precision)
    with_length = replace(config, data=data) if splits.vocabulary else config
    for options in _models(config, splits, sizes):
        smaller = replace(with_length, model=options)
        folded = _with_vocabulary(splits, options)
        if not _optimized_alike(smaller, folded, original):
            continue
        for rows in _divisors(config.train.global_batch):
            clip_norm = min(config.train.clip_norm, LEAST_CLIP_NORM)
            train = replace(config.train, global_batch=rows, clip_norm=clip_norm)
            tried = _lower_floors(replace(smaller, train=train), folded, original)
            if _works(tried, folded, devices):
                return Reduced(tried, folded, _changes(config, tried, splits))
    return Reduced(config, open_splits(config.data, search_path(config)), {})


def _works(config: Config, splits: Splits, devices: list[str]) -> bool:
    """Whether the step of a config can be built and traced; a mistake that verification explains is let through."""
    try:
        built = build(config, splits=splits, devices=devices)
    except (ValueError, TypeError):
        return False
    try:
        jax.eval_shape(built.step.gradients, built.step.abstract_state(), built.batch)
    except (ValueError, TypeError) as error:
        return refused(error, built.layouts) is not None
    return True


def _looks_at_sizes(config: Config, *names: str) -> bool:
    """Whether the optimizer is one of these, or the user's own, which may do as any of them."""
    return any(name in names or ":" in name for name in config.optimizer.names)


def _optimized_alike(config: Config, splits: Splits, original: Built) -> bool:
    """Whether an optimizer that decides by sizes decides the same for every array of a smaller model."""
    factors, orients = _looks_at_sizes(config, "adafactor"), _looks_at_sizes(config, "muon")
    if not (factors or orients):
        return True
    before = {row.path: row.shape for row in original.layouts.table.rows}
    arrays = leaves_with_paths(abstract_parameters(configured_model(config, splits), config.precision))
    pairs = [(path, before[path], leaf.shape) for path, leaf in arrays if len(before.get(path, ())) == leaf.ndim]
    if factors and not all(_factored_alike(shape, small) for _, shape, small in pairs):
        return False
    hidden = [pair for pair in pairs if pair[0].split("/")[0] not in LEFT_TO_ADAM]
    return not orients or all(_upright(shape) == _upright(small) for _, shape, small in hidden)


def _factored_alike(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all((size >= FACTORED) == (small >= FACTORED) for size, small in zip(shape[-2:], other[-2:], strict=True))


def _upright(shape: tuple[int, ...]) -> bool:
    """Whether a matrix has more rows than columns; muon multiplies along the shorter dim."""
    return len(shape) > 1 and shape[-2] > shape[-1]


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _models(config: Config, splits: Splits, sizes: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
    """Options of the model, the smallest first; the user's own model keeps its options."""
    if config.model["name"] in MODELS:
        smaller = _smaller(config, splits, sizes)
        yield smaller
        if "layers" in smaller:
            yield {**smaller, "layers": config.model["layers"]}
    yield config.model


def _over_rows() -> set[str]:
    """The mesh axes that split rows and nothing inside of a model."""
    return set(axes_that_split("rows")) - set(axes_that_split("work"))


def _smaller(config: Config, splits: Splits, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Options of a reference model: every size smaller, divided by what divided it."""
    options = dict(config.model)
    given = {name: value for name, value in options.items() if name not in ("name", "check", "lora")}
    known: Any = MODELS[options["name"]][0](**given)
    devices, inside = prod(sizes.values()), prod(size for axis, size in sizes.items() if axis not in _over_rows())
    pipe = config.strategy.get("pipe")
    virtual_stages = getattr(pipe, "size", 1) * (getattr(pipe, "virtual", None) or 1)
    least = partial(_least, _looks_at_sizes(config, "adafactor"))
    smaller: dict[str, Any] = {}
    if "heads" in options:
        smaller = _smaller_heads(known, devices, inside, least)
    if "layers" in options:
        smaller["layers"] = shrink(known.layers, virtual_stages, max(LEAST_LAYERS, virtual_stages))
    if "mlp_width" in options:
        longer = 2 * smaller["width"] if _looks_at_sizes(config, "muon") and known.mlp_size > known.width else 0
        smaller["mlp_width"] = shrink(known.mlp_size, devices, max(longer, least(known.mlp_size)))
    if "vocabulary" in options:
        smaller["vocabulary"] = shrink(known.vocabulary or splits.vocabulary or 0, devices, LEAST_VOCABULARY)
    if "widths" in options:
        smaller["widths"] = tuple(shrink(each, devices, least(each)) for each in known.widths)
    return {**options, **smaller}


def _least(factors: bool, size: int, least: int = LEAST_WIDTH) -> int:
    """The least that a width may become: under an optimizer that factors, what it factors it still does."""
    return FACTORED if factors and size >= FACTORED else least


def _smaller_heads(known: Any, devices: int, inside: int, least: Callable[..., int]) -> dict[str, int]:
    """Fewer and narrower heads: as many queries to a key, and the widths of all of them divided as before."""
    kv_heads = shrink(known.num_kv_heads, inside, min(2, known.num_kv_heads))
    heads = kv_heads * (known.heads // known.num_kv_heads)
    widths = [(number * known.head_size, few) for number, few in ((known.heads, heads), (known.num_kv_heads, kv_heads))]
    sizes = (size for size in range(LEAST_HEAD, known.head_size, 2))
    fitting = (
        size
        for size in sizes
        if all(_alike(few * size, width, devices) and few * size >= least(width, 0) for width, few in widths)
    )
    size = next(fitting, known.head_size)
    smaller = {"heads": heads, "kv_heads": kv_heads if known.kv_heads else 0}
    if known.head_width and known.heads * known.head_size == known.width:
        return {**smaller, "head_width": size, "width": heads * size}
    if known.head_width:
        width = shrink(known.width, devices, least(known.width))
        return {**smaller, "head_width": size, "width": width}
    return {**smaller, "width": heads * size}


def shrink(number: int, modulus: int, least: int) -> int:
    """The smallest number from `least` on that shares with `modulus` what `number` shares with it; at most `number`.

    Args:
        number: A size.
        modulus: The product of the mesh's sizes that may split it.
        least: Where to start.
    """
    return next((each for each in range(max(least, 1), number) if _alike(each, number, modulus)), number)


def _alike(size: int, other: int, modulus: int) -> bool:
    return gcd(size, modulus) == gcd(other, modulus)


def _lower_floors(config: Config, splits: Splits, original: Built) -> Config:
    """The config with floors so low that what is split over their axis in the original still is."""
    shapes = dict(leaves_with_paths(abstract_parameters(configured_model(config, splits), config.precision)))
    strategy = dict(config.strategy)
    for axis, options in config.strategy.items():
        if hasattr(options, "floor_bytes"):
            floor = min([options.floor_bytes, *_split_sizes(axis, original, shapes)])
            strategy[axis] = replace(options, floor_bytes=floor)
    return replace(config, strategy=strategy)


def _split_sizes(axis: str, original: Built, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[int]:
    """The bytes of one block's part, in the smaller model, of each parameter that the original splits over an axis."""
    layouts = original.layouts
    for row in layouts.update_table.rows:
        if axis in row.layout.used_axes and row.path in shapes:
            leaf = shapes[row.path]
            first = 1 if isinstance(original.model, BlockModel) and in_blocks(row.path) else 0
            parts = prod(layouts.mesh.axis_size(other) for other in row.layout.used_axes if other != axis)
            yield prod(leaf.shape[first:]) * leaf.dtype.itemsize // parts


def _with_vocabulary(splits: Splits, options: Mapping[str, Any]) -> Splits:
    """The same examples with token ids folded into a smaller vocabulary, where the model has one."""
    vocabulary = options.get("vocabulary", 0) if options["name"] in MODELS else 0
    if not vocabulary or not splits.vocabulary or vocabulary >= splits.vocabulary:
        return splits
    return splits._replace(train=Folded(splits.train, vocabulary), evaluation=None, vocabulary=vocabulary)


class Folded:
    """Examples of a source, their token ids taken modulo a smaller vocabulary."""

    def __init__(self, source: Source, vocabulary: int) -> None:
        self.source, self.vocabulary = source, vocabulary

    def __len__(self) -> int:
        return len(self.source)

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Which example each sample is: as in the source."""
        return source_order(samples, source=self.source, seed=seed, shuffle=shuffle)

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """One example."""
        return {name: rows[0] for name, rows in self.take(np.array([index])).items()}

    def take(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """The examples at `indices`, stacked on dim 0."""
        examples = take(self.source, indices)
        return {name: rows % self.vocabulary if name in TOKENS else rows for name, rows in examples.items()}


def _changes(before: Config, after: Config, splits: Splits) -> dict[str, tuple[Any, Any]]:
    """Every key that was reduced; sizes that the data gives are those it gives."""
    from_data = {"vocabulary": splits.vocabulary}
    pairs: dict[str, tuple[Any, Any]] = {
        "train.global_batch": (before.train.global_batch, after.train.global_batch),
        "train.clip_norm": (before.train.clip_norm, after.train.clip_norm),
        "data.length": (before.data.length, after.data.length),
    }
    for name, value in after.model.items():
        given = before.model[name]
        known = given or from_data.get(name) or given
        if name == "mlp_width" and not given and value:
            known = "8/3 of model.width"
        pairs[f"model.{name}"] = (known, value or known)
    for axis, options in after.strategy.items():
        floors = [getattr(each, "floor_bytes", None) for each in (before.strategy[axis], options)]
        pairs[f"strategy.{axis}.floor_bytes"] = (floors[0], floors[1])
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
