"""Several sources in one run, each with its share of the samples.

    data.mixture: [{source: text, files: [...], weight: 7}, {source: tokens, files: [...], weight: 3}]

The part that sample g comes from follows from g alone (see `shares`), and so does its example: each part is shuffled in
its own epochs, with its own seed. Parts are not copied, and none is read before its turn.

A part may be a stream. The n-th sample of that part is then its row n, for any seed: samples of a part come in order,
so its rows are read in one direction, and a resumed run reads again as many rows as the part has given.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig, part_config
from ..examples import shapes_of
from ..shares import locate, whole_weights
from ..source import BadDataError, BatchedSource, Source, Splits, find_part, fingerprint, is_stream, origin_of, take
from .order import part_seed, source_order

MAX_ROWS = 1 << 48
"""Rows of a stream that have a place in a mixture: more than any run has."""
STREAM_LENGTH = 1 << 60
"""A part of at least this length is a stream, or a mixture that contains one."""


class Mixture(BatchedSource):
    """The examples of several sources, one after the other; `order` maps samples to them.

    Args:
        sources: The parts, with examples of the same names, dtypes and shapes.
        weights: Integers, from `shares.whole_weights`.
        names: The names of the parts in messages.
    """

    def __init__(self, sources: Sequence[Source], weights: tuple[int, ...], names: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self.weights = weights
        self._names = names
        lengths = [MAX_ROWS if len(source) >= STREAM_LENGTH else len(source) for source in sources]
        self._starts = np.cumsum([0, *lengths])
        self.is_stream = any(map(is_stream, sources))

    def __len__(self) -> int:
        """Returns the number of examples in all parts; a stream counts as more than any run has."""
        return int(self._starts[-1])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at `indices` (int64, (N,)), stacked on dim 0."""
        parts, places = find_part(self._starts, indices)
        rows: dict[str, np.ndarray] = {}
        for part in np.unique(parts):
            is_of_part = parts == part
            for name, array in take(self.sources[part], places[is_of_part]).items():
                if name not in rows:
                    rows[name] = np.empty((len(indices), *array.shape[1:]), array.dtype)
                rows[name][is_of_part] = array
        return rows

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Returns the example of each sample of a run.

        Args:
            samples: int64, (N,), global sample indices, >= 0.
            seed: Selects the order within the parts, >= 0.
            shuffle: If false, every part has its own order.

        Returns:
            int64, (N,), indices into this mixture.
        """
        parts, numbers = locate(samples, self.weights)
        examples = np.empty_like(numbers)
        for part in np.unique(parts):
            is_of_part = parts == part
            places = source_order(
                numbers[is_of_part], source=self.sources[part], seed=part_seed(seed, int(part)), shuffle=shuffle
            )
            examples[is_of_part] = self._starts[part] + places
        return examples

    def origin(self, index: int) -> str:
        """Returns the part of example `index`, and its origin there."""
        part, place = map(int, find_part(self._starts, index))
        origin = origin_of(self.sources[part], place) or f"example {place}"
        return f"{self._names[part]}, {origin}"


class EvenlyMixed(BatchedSource):
    """The first samples of a mixture in the parts' own order, until a part has no further example.

    Args:
        mixture: Held-out examples.
    """

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._length = _samples_without_repeats([len(source) for source in mixture.sources], mixture.weights)

    def __len__(self) -> int:
        """Returns the number of samples; all are different examples."""
        return self._length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the samples at `indices` (int64, (N,)), stacked on dim 0."""
        return self._mixture.take(self._mixture.order(indices, seed=0, shuffle=False))

    def origin(self, index: int) -> str:
        """Returns the part of sample `index`, and its origin there."""
        examples = self._mixture.order(np.array([index]), seed=0, shuffle=False)
        return self._mixture.origin(int(examples[0]))


def mix(parts: Sequence[tuple[Splits, float]]) -> Splits:
    """Mixes the examples of several splits.

    Args:
        parts: Splits and their weights. 7 and 3, or 0.7 and 0.3, are the same: of the first n samples, for any n, each
            part has its share to within one.

    Returns:
        Splits with the training examples of all parts. The held-out examples have the same shares: those of each part
        in its order, each at most once, until a part has no further one. Parts without held-out examples are left out
        there.

    Raises:
        UserError: Parts are missing, weights are not positive or need a sum over 65,536 as integers, examples differ
            in names, dtypes or shapes, or parts have different numbers of token ids.
    """
    return _mix([splits for splits, _ in parts], [weight for _, weight in parts], "the parts of a mixture")


def open_mixture(config: DataConfig, open_part: Callable[[DataConfig], Splits]) -> Splits:
    """Opens the parts of `data.mixture` and mixes them.

    Args:
        config: The `data:` section, with at least one part.
        open_part: Opens the data of the config of one part.

    Raises:
        UserError: See `mix`; or a part cannot be opened, with its name.
    """
    opened = []
    for number in range(len(config.mixture)):
        try:
            opened.append(open_part(part_config(config, number)))
        except UserError as error:
            if type(error) not in (UserError, BadDataError):
                raise
            lines = [f"data.mixture[{number}]: {line}" for line in str(error).splitlines()]
            raise type(error)("\n".join(lines)) from error
    return _mix(opened, [part.weight for part in config.mixture], "data.mixture")


def _mix(splits: Sequence[Splits], weights: Sequence[float], key: str) -> Splits:
    """Mixes splits; `key` names the mixture in messages."""
    if not splits:
        raise UserError(f"{key}: the list is empty. Give at least one part, with its weight.")
    integer_weights = whole_weights(weights, key)
    names = [f"{key}[{number}]" for number in range(len(splits))]
    _check_parts(splits, names)
    descriptions = []
    for part, weight in zip(splits, integer_weights, strict=True):
        descriptions.append(f"{100 * weight / sum(integer_weights):.4g} % {part.description}")
    fingerprints = [part.fingerprint for part in splits]
    content = ""
    if all(fingerprints):
        content = fingerprint((), "mixture", integer_weights, fingerprints)
    return Splits(
        train=Mixture([part.train for part in splits], integer_weights, names),
        evaluation=_mix_held_out(splits, integer_weights, names, key),
        vocabulary=splits[0].vocabulary,
        description=f"mixture of {' + '.join(descriptions)}",
        fingerprint=content,
    )


def _mix_held_out(
    splits: Sequence[Splits], weights: Sequence[int], names: Sequence[str], key: str
) -> EvenlyMixed | None:
    """Mixes the held-out examples of the parts that have some; None if none has."""
    sources = []
    weights_of_sources = []
    names_of_sources = []
    for part, weight, name in zip(splits, weights, names, strict=True):
        if part.evaluation is not None:
            sources.append(part.evaluation)
            weights_of_sources.append(weight)
            names_of_sources.append(name)
    if not sources:
        return None
    return EvenlyMixed(Mixture(sources, whole_weights(weights_of_sources, key), names_of_sources))


def _check_parts(splits: Sequence[Splits], names: Sequence[str]) -> None:
    """Raises a UserError if parts have different examples or vocabularies."""
    forms = [shapes_of(part.train[0]) for part in splits]
    for form, name in zip(forms, names, strict=True):
        if form != forms[0]:
            raise UserError(f"{names[0]} has examples of {forms[0]}, but {name} has {form}; they must be the same.")
    numbers = [part.vocabulary for part in splits]
    if len(set(numbers)) > 1:
        counts = [f"{name} has {number or 'no'} token ids" for name, number in zip(names, numbers, strict=True)]
        raise UserError(
            f"{', '.join(counts)}: the same id must mean the same token in all parts. If it does, set data.vocabulary "
            "to the number of all ids."
        )


def _samples_without_repeats(lengths: Sequence[int], weights: tuple[int, ...]) -> int:
    """Returns the number of samples before a part would give an example a second time."""
    most = min(length * sum(weights) // weight for length, weight in zip(lengths, weights, strict=True))
    first = max(0, most - 2 * sum(weights))  # a part is never more than one example ahead of its share
    parts, numbers = locate(np.arange(first, most + 2 * sum(weights) + 1), weights)
    return first + int(np.argmax(numbers >= np.array(lengths)[parts]))
