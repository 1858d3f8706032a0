"""Text files as bytes: a vocabulary of 256, with byte 0 after each document."""

from collections.abc import Sequence

import numpy as np

from ....mesh.text import counted
from ...config import DataConfig
from ..files import FoundFile, find_files
from .documents import Corpus, Document

BYTES = 256
SEPARATOR = np.zeros(1, np.uint8)
MAPPED_BYTES = 1 << 26


def read_text(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads text files, each one document.

    Args:
        patterns: Files or globs.
        config: Not used: bytes need no options.
        key: Config key of the patterns, for messages.

    Returns:
        The corpus; files of 64 MiB and more are memory-mapped, smaller ones read into memory.

    Raises:
        UserError: a pattern matches nothing.
    """
    del config
    return text_corpus(find_files(patterns, key=key), "text files")


def text_corpus(files: Sequence[FoundFile], description: str) -> Corpus:
    """The bytes of `files` as a corpus, split by file name."""
    documents = [_read(file) for file in files]
    num_bytes = sum(len(document.ids) for document in documents)
    return Corpus(
        documents, SEPARATOR, BYTES, f"{description} ({counted(len(documents), 'file')}, {num_bytes:,} bytes)"
    )


def _read(file: FoundFile) -> Document:
    mapped = file.path.stat().st_size >= MAPPED_BYTES
    ids = np.memmap(file.path, np.uint8, mode="r") if mapped else np.fromfile(file.path, np.uint8)
    return Document(file.name.encode(), np.asarray(ids), file.name, mapped)
