"""Examples that stay in files: each is a record of bytes that is read and decoded when a batch needs it.

A record that cannot be read or decoded ends the run, or, up to `data.bad_records` of them, has weights of 0 and keeps
its place in the order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..examples import shapes_of, with_weights
from ..source import BadDataError, Splits, fingerprint, splits_of, spread_indices
from .source_files import BadRecords, raise_system_error, reason_of

Arrays = dict[str, np.ndarray]
UNREADABLE = (RuntimeError, ValueError, SyntaxError, OSError)
"""Errors of Riegeli, NumPy and Pillow for corrupt content."""
SAMPLED = 64
"""Records of a split, evenly spread, that are decoded when the data is opened; their bytes are its fingerprint."""


class Records(NamedTuple):
    """The records of some files, by number.

    Attributes:
        read: The function from the number of a record to its bytes.
        decode: The function from the number of a record and its bytes to its arrays.
        describe: The function from the number of a record to its file, and place in it.
        fix: The fix for a record of another form than the first, for messages.
    """

    read: Callable[[int], bytes]
    decode: Callable[[int, bytes], Arrays]
    describe: Callable[[int], str]
    fix: str


class FileExamples:
    """Examples that are records of files.

    Args:
        records: The records.
        rows: int64, the numbers of the records that are examples.
        bad: Counts records that cannot be read.
    """

    def __init__(self, records: Records, rows: np.ndarray, bad: BadRecords) -> None:
        self._records = records
        self._rows = rows
        self._bad = bad
        self.form = self._first_form()

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Arrays:
        """Returns example `index`.

        Raises:
            BadDataError: The record cannot be read or has another form than the first, and the limit of bad records is
                reached.
        """
        example = self._example(index)
        if example is not None and shapes_of(example) != self.form:
            reason = f"it has {shapes_of(example)}, but the first record has {self.form}. {self._records.fix}."
            self._bad.leave_out(self.origin(index), reason)
            example = None
        if example is not None:
            return example
        return {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.form.items()}

    def origin(self, index: int) -> str:
        """Returns file and place of example `index`."""
        return self._records.describe(int(self._rows[index]))

    def raw(self, index: int) -> np.ndarray:
        """Returns the bytes of example `index`, uint8; empty if it cannot be read."""
        try:
            return np.frombuffer(self._records.read(int(self._rows[index])), np.uint8)
        except UNREADABLE as error:
            raise_system_error(error)
            return np.zeros(0, np.uint8)

    def _example(self, index: int) -> Arrays | None:
        """Returns an example, or None if it cannot be read and is left out."""
        row = int(self._rows[index])
        try:
            return with_weights(self._records.decode(row, self._records.read(row)), 0)
        except UNREADABLE as error:
            raise_system_error(error)
            self._bad.leave_out(self.origin(index), f"it cannot be read: {reason_of(error)}.")
            return None

    def _first_form(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the form of the first record that can be read."""
        for index in range(len(self)):
            example = self._example(index)
            if example is not None:
                return shapes_of(example)
        raise UserError(f"none of {len(self):,} records can be read; the first is {self.origin(0)}.")


def make_file_splits(records: Records, rows: Sequence[np.ndarray], config: DataConfig) -> Splits:
    """Makes splits of records.

    Args:
        records: The records of both splits.
        rows: The numbers of the training records and, if any are held out, of the evaluation records.
        config: `bad_records`, the maximum number that each process leaves out; `vocabulary`.

    Raises:
        UserError: The two splits have other forms.
        BadDataError: A sampled record cannot be read, and the limit of bad records is reached.
    """
    bad = BadRecords(config.bad_records, BadDataError)
    sources = [FileExamples(records, rows_of_split, bad) for rows_of_split in rows]
    if sources[0].form != sources[-1].form:
        forms = f"training records are {sources[0].form}, but evaluation records {sources[-1].form}"
        raise UserError(f"{forms}. {records.fix}.")
    sampled = []
    for source in sources:
        for index in spread_indices(len(source), SAMPLED):
            source[index]  # raises an error for a record that cannot be decoded
            sampled.append(source.raw(index))
    sizes = " and ".join(f"{len(source):,}" for source in sources)
    description = f"{config.source}: {', '.join(sources[0].form)}; {sizes} examples"
    content = fingerprint(sampled, sizes)
    return splits_of(sources, config.vocabulary or None, description, content)
