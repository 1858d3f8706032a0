"""Text files as bytes: a vocabulary of 256, with byte 0 after each document."""

from collections.abc import Sequence

import numpy as np

from ....mesh.text import counted
from ...config import DataConfig
from ..files import FoundFile, find_files
from .documents import Corpus, Document

BYTES = 256
"""The vocabulary of text without a tokenizer, whose tokens are its bytes."""
SEPARATOR = np.zeros(1, np.uint8)
MAPPED_BYTES = 1 << 26


class ByteCodec:
    """Text as its UTF-8 bytes, and back."""

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode() if isinstance(text, str) else text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes, with replacement characters for what is not UTF-8."""
        return bytes(tokens).decode("utf-8", errors="replace")


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
