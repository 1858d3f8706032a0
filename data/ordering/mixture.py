"""Several sources in one run, each with its share of the samples.

    data.mixture: [{source: text, files: [...], weight: 7}, {source: tokens, files: [...], weight: 3}]

Which part sample g comes from follows from g alone (see `shares`), and so does which of the part's examples it is: each
part is shuffled in epochs of its own, by a seed of its own. No part is copied, and none is read before its turn.

A part may be a stream. The n-th sample of that part is then its row n, whatever the seed: samples of a part come in
order, so its rows are read in one direction, and a run that goes on reads again as many as the part has given.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig, part_config
from ..source import BadDataError, Source, Splits, fingerprint, is_stream, take
from .order import source_order
from .shares import locate, whole_weights

MOST_ROWS = 1 << 48
"""Rows of a stream that have a place in a mixture: more than any run has."""
WITHOUT_END = 1 << 60
"""The length from which on a part is a stream. A mixture that holds one is long, and all of its rows have places."""


class Mixture:
    """The examples of several sources, one after the other; `order` says which of them a sample is.

    Args:
        sources: The parts, with examples of the same names, dtypes and shapes.
        weights: Whole numbers, from `shares.whole_weights`.
        names: What the parts are called in messages.
    """

    def __init__(self, sources: Sequence[Source], weights: tuple[int, ...], names: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self.weights = weights
        self._names = names
        self._starts = np.cumsum([0, *map(_places, sources)])
        self.is_stream = any(map(is_stream, sources))
        streamed = [weight * _streamed_share(source) for source, weight in zip(sources, weights, strict=True)]
        self.streamed_share = sum(streamed) / sum(weights)

    def __len__(self) -> int:
        """Number of examples in all parts together; of a stream, more than any run has."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Example `index`, in [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        part = self._part_of(np.array(index))
        return self.sources[int(part)][index - int(self._starts[part])]

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)), stacked on dim 0."""
        parts, rows = self._part_of(indices), {}
        for part in np.unique(parts):
            chosen = parts == part
            for name, array in take(self.sources[part], indices[chosen] - self._starts[part]).items():
                rows.setdefault(name, np.empty((len(indices), *array.shape[1:]), array.dtype))[chosen] = array
        return rows

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Which example each sample of a run is.

        Args:
            samples: int64, (N,), global sample indices, >= 0.
            seed: Chooses the order within the parts, >= 0.
            shuffle: False for every part's own order.

        Returns:
            int64, (N,), indices into this mixture.
        """
        parts, numbers = locate(samples, self.weights)
        examples = np.empty_like(numbers)
        for part in np.unique(parts):
            chosen, source = parts == part, self.sources[part]
            within = source_order(numbers[chosen], source=source, seed=_seed_of(seed, int(part)), shuffle=shuffle)
            examples[chosen] = self._starts[part] + within
        return examples

    def origin(self, index: int) -> str:
        """Which part example `index` is of, and where it comes from there."""
        part = int(self._part_of(np.array(index)))
        within = index - int(self._starts[part])
        origin = getattr(self.sources[part], "origin", None)
        told = origin(within) if origin is not None else ""
        return f"{self._names[part]}, {told or f'example {within}'}"

    def _part_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, indices, side="right") - 1


class EvenlyMixed:
    """The first samples of a mixture in the parts' own order, as many as there are before a part runs out.

    Args:
        mixture: Held-out examples.
    """

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._length = _samples_without_repeats([len(source) for source in mixture.sources], mixture.weights)

    def __len__(self) -> int:
        """Number of samples, none of which is the same example as another."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`, in [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self._mixture[self._index(index)]

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples at `indices` (int64, (N,)), stacked on dim 0."""
        return self._mixture.take(self._mixture.order(indices, seed=0, shuffle=False))

    def origin(self, index: int) -> str:
        """Which part sample `index` is of, and where it comes from there."""
        return self._mixture.origin(self._index(index))

    def _index(self, sample: int) -> int:
        return int(self._mixture.order(np.array([sample]), seed=0, shuffle=False)[0])


def mix(parts: Sequence[tuple[Splits, float]]) -> Splits:
    """Mixes the examples of several splits.

    Args:
        parts: Splits and their weights. 7 and 3, or 0.7 and 0.3, are the same: of any n samples in a row from the first
            on, each part has its share to within one.

    Returns:
        Splits whose training examples are those of all parts. The held-out examples have the same shares: those of each
        part in its order, each at most once, until one part has none left; parts without any take no part in that.

    Raises:
        UserError: no parts, weights that are no numbers above 0 or whose ratio is too fine (65,536 is the largest sum
            of the whole numbers that they are in the ratio of), examples that differ in names, dtypes or shapes, or
            parts that disagree on the number of token ids.
    """
    return _mix([splits for splits, _ in parts], [weight for _, weight in parts], "the parts of a mixture")


def open_mixture(config: DataConfig, open_part: Callable[[DataConfig], Splits]) -> Splits:
    """Opens the parts of `data.mixture` and mixes them.

    Args:
        config: With at least one part.
        open_part: Opens what the config of one part names.

    Raises:
        UserError: As `mix`, or a part cannot be opened; names the part.
    """
    opened = []
    for number in range(len(config.mixture)):
        with _told_of_part(f"data.mixture[{number}]"):
            opened.append(open_part(part_config(config, number)))
    return _mix(opened, [part["weight"] for part in config.mixture], "data.mixture")


def _mix(splits: Sequence[Splits], weights: Sequence[float], key: str) -> Splits:
    """As `mix`; `key` names the mixture in messages."""
    if not splits:
        raise UserError(f"{key}: there are none. Give at least one, with its weight.")
    whole = whole_weights(weights, key)
    names = [f"{key}[{number}]" for number in range(len(splits))]
    _check_parts(splits, names)
    triples = [*zip(splits, whole, names, strict=True)]
    held_out = [(each.evaluation, weight, name) for each, weight, name in triples if each.evaluation is not None]
    evaluation = None
    if held_out:
        sources, shares, their_names = zip(*held_out, strict=True)
        evaluation = EvenlyMixed(Mixture(sources, whole_weights(shares, key), their_names))
    described = [f"{100 * weight / sum(whole):.4g} % {each.description}" for each, weight, _ in triples]
    known = all(each.fingerprint for each in splits)
    return Splits(
        train=Mixture([each.train for each in splits], whole, names),
        evaluation=evaluation,
        vocabulary=splits[0].vocabulary,
        description=f"mixture of {' + '.join(described)}",
        fingerprint=fingerprint((), "mixture", whole, [each.fingerprint for each in splits]) if known else "",
    )


def _check_parts(splits: Sequence[Splits], names: Sequence[str]) -> None:
    """Raises where parts do not fit together."""
    forms = [_form(each.train) for each in splits]
    for form, name in zip(forms, names, strict=True):
        if form != forms[0]:
            raise UserError(f"{names[0]} has examples of {forms[0]}, but {name} has {form}; they must be alike.")
    numbers = [each.vocabulary for each in splits]
    if len(set(numbers)) > 1:
        told = [f"{name} has {number or 'no'} token ids" for name, number in zip(names, numbers, strict=True)]
        raise UserError(
            f"{', '.join(told)}: the same id has to mean the same token in all parts. Where it does, set "
            "data.vocabulary to the number of all ids."
        )


def _places(source: Source) -> int:
    """How many rows of a part have a place in a mixture."""
    return MOST_ROWS if len(source) >= WITHOUT_END else len(source)


def _streamed_share(source: Source) -> float:
    """Which share of the samples of a source comes from streams, in [0, 1]."""
    return getattr(source, "streamed_share", float(is_stream(source)))


def _form(source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(array.dtype), np.shape(array)) for name, array in sorted(source[0].items())}


def _samples_without_repeats(lengths: Sequence[int], weights: tuple[int, ...]) -> int:
    """How many samples there are before a part would have to give one a second time."""
    most = min(length * sum(weights) // weight for length, weight in zip(lengths, weights, strict=True))
    first = max(0, most - 2 * sum(weights))  # a part is never more than one example ahead of its share
    parts, numbers = locate(np.arange(first, most + 2 * sum(weights) + 1), weights)
    return first + int(np.argmax(numbers >= np.array(lengths)[parts]))


@functools.lru_cache(maxsize=64)
def _seed_of(seed: int, part: int) -> int:
    """A seed for each part, so that parts of the same size have different orders."""
    return int(np.random.SeedSequence([seed, part]).generate_state(1, np.uint64)[0])


@contextmanager
def _told_of_part(name: str) -> Iterator[None]:
    """Puts the part into the messages of errors."""
    try:
        yield
    except UserError as error:
        if type(error) not in (UserError, BadDataError):
            raise
        raise type(error)("\n".join(f"{name}: {line}" for line in str(error).splitlines())) from error
