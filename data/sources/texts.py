"""Documents of token ids: text files as bytes, the standard library's source, memory-mapped arrays of token ids.

A split must not depend on the machine, on the order of files, or on the number of processes: a document is held out if
the hash of its key (its name, or its content) is below the fraction. If that would hold out fewer than `MIN_HELD_OUT`
documents, as with one big file, the end of every document is held out instead.

The embedded data set, `read_stdlib`, is real text on every machine with Python, without a download. Its files are fixed
here, so that distributions that leave out or add some parts still give nearly the same text: every `*.py` in the
standard library's directory, except tests, installed packages, optional parts (idlelib, lib2to3, distutils,
ensurepip, tkinter, turtledemo), tables (encodings, pydoc_data), and files written at build or install time.
"""

import os
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...mesh.errors import UserError, counted, raise_problems
from ..config import DataConfig
from ..source import hash_fraction
from .source_files import FoundFile, find_files, raise_system_error, reason_of

MIN_HELD_OUT = 5
BYTES = 256
"""The vocabulary of text without a tokenizer, whose tokens are its bytes."""
SEPARATOR = 0
"""The byte that ends a text."""
FORMATS = {
    b"PAR1": "a Parquet file: set data.source: parquet",
    b"ARROW1": "an Arrow file: set data.source: huggingface, with the directory of the dataset in data.files",
    b"\x93NUMPY": "a NumPy array: set data.source: tokens",
    b"PK\x03\x04": "a zip archive (.npz, .zip, .docx): unpack it, or set data.source: arrays for .npz",
    b"\x1f\x8b": "compressed with gzip: decompress it first, with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it first, with unzstd",
    b"BZh": "compressed with bzip2: decompress it first, with bunzip2",
    b"\xfd7zXZ\x00": "compressed with xz: decompress it first, with unxz",
    b"\x89PNG": "an image: set data.source: images, with the directory of the classes in data.files",
    b"\xff\xd8\xff": "an image: set data.source: images, with the directory of the classes in data.files",
    b"%PDF-": "a PDF document: extract its text first, with pdftotext",
    b"\x89HDF": "an HDF5 file: convert it to .npz or .npy first",
    b"SQLite format 3\x00": "an SQLite database: export its texts first",
    b"\x7fELF": "a program: leave it out of data.files",
}
"""The first bytes of files that are not text -> the format and the fix."""
MAX_NAMED = 5
"""Files that are not text listed in a message."""
MAPPED_BYTES = 1 << 26
"""Text files of this size are memory-mapped."""
RAW_SUFFIXES = (".bin", ".raw", ".dat")
SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "__phello__"}
    | {"idlelib", "lib2to3", "distutils", "ensurepip", "tkinter", "turtledemo"}
    | {"encodings", "pydoc_data"}
)
SKIPPED_FILES = frozenset({"sitecustomize.py", "usercustomize.py", "__phello__.foo.py", "_sysconfig_vars.py"})
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


class Document(NamedTuple):
    """Token ids that belong together.

    Attributes:
        key: Decides the side of the split that the document is on.
        ids: Unsigned integers, (tokens,).
        name: The name in messages.
        mapped: Memory-mapped: stays a stream of its own and is never copied whole.
    """

    key: bytes
    ids: np.ndarray
    name: str
    mapped: bool = False


class Corpus(NamedTuple):
    """The documents that a reader found.

    Attributes:
        documents: The documents, in an order that does not depend on the machine.
        separator: The id put after each document that is joined with others; None: none.
        vocabulary: Number of token ids if the reader knows it (256 for bytes), else None.
        description: A description for people.
    """

    documents: Sequence[Document]
    separator: int | None
    vocabulary: int | None
    description: str


class ByteCodec:
    """Text as its UTF-8 bytes, and back."""

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode() if isinstance(text, str) else text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes, with replacement characters for invalid UTF-8."""
        return bytes(tokens).decode("utf-8", errors="replace")


def split_documents(documents: Sequence[Document], eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """Divides documents into training and evaluation documents, each in the order given.

    Args:
        documents: All documents.
        eval_fraction: The share to hold out, in [0, 1).
    """
    held_out = [hash_fraction(document.key) < eval_fraction for document in documents]
    if eval_fraction > 0 and sum(held_out) < MIN_HELD_OUT:
        cuts = [(each, len(each.ids) - round(len(each.ids) * eval_fraction)) for each in documents]
        kept = [each._replace(ids=each.ids[:cut]) for each, cut in cuts]
        return kept, [each._replace(ids=each.ids[cut:]) for each, cut in cuts]
    sides = [*zip(documents, held_out, strict=True)]
    return [document for document, out in sides if not out], [document for document, out in sides if out]


def join(documents: Sequence[Document], separator: int | None) -> list[Document]:
    """Joins documents into as few as possible: memory-mapped ones stay alone, the others become one.

    Args:
        documents: The documents in their order; empty ones are left out.
        separator: The id put after each joined document; None: none.

    Returns:
        The joined document first, if any, then the memory-mapped ones.
    """
    end = [] if separator is None else [separator]
    small = [each.ids for each in documents if len(each.ids) and not each.mapped]
    parts = [part for ids in small for part in (ids, np.array(end, ids.dtype))]
    joined = [Document(b"", np.concatenate(parts), "documents")] if parts else []
    return joined + [each for each in documents if len(each.ids) and each.mapped]


def read_text(patterns: tuple[str, ...], key: str) -> Corpus:
    """Reads text files as bytes, each one document; byte 0 follows each.

    Args:
        patterns: Files or globs.
        key: Config key of the patterns, for messages.

    Returns:
        The corpus; files of 64 MiB and more are memory-mapped, smaller ones read into memory.

    Raises:
        UserError: A pattern does not match any file, or a file has another format than text.
    """
    files = find_files(patterns, key=key)
    problems = [_not_text(file.path, key) for file in files]
    raise_problems(filter(None, problems), most=MAX_NAMED)
    return _text_corpus(files, "text files")


def _not_text(path: Path, key: str) -> str:
    """Returns the problem of a file whose first bytes are those of another format, or ""."""
    with path.open("rb") as file:
        begin = file.read(max(map(len, FORMATS)))
    for magic, remedy in FORMATS.items():
        if begin.startswith(magic):
            return f"{key}: {path} is not text but {remedy}."
    return ""


def _text_corpus(files: Sequence[FoundFile], description: str) -> Corpus:
    documents = []
    for file in files:
        mapped = file.path.stat().st_size >= MAPPED_BYTES
        ids = np.memmap(file.path, np.uint8, mode="r") if mapped else np.fromfile(file.path, np.uint8)
        documents.append(Document(file.name.encode(), np.asarray(ids), file.name, mapped))
    size = f"{counted(len(documents), 'file')}, {sum(len(document.ids) for document in documents):,} bytes"
    return Corpus(documents, SEPARATOR, BYTES, f"{description} ({size})")


def stdlib_files(root: Path) -> tuple[FoundFile, ...]:
    """Returns the files of the embedded data set, sorted by relative path.

    Args:
        root: The standard library's directory, `sysconfig.get_paths()["stdlib"]`.
    """
    found = []
    for directory, children, names in os.walk(root):
        children[:] = [name for name in children if not _is_skipped(name)]
        paths = [Path(directory, name) for name in names if name.endswith(".py") and not _is_skipped(name)]
        found += [FoundFile(path, path.relative_to(root).as_posix()) for path in paths]
    return tuple(sorted(found, key=lambda file: file.name))


def _is_skipped(name: str) -> bool:
    return name in SKIPPED_DIRECTORIES or name in SKIPPED_FILES or name.startswith(SKIPPED_PREFIXES)


def read_stdlib() -> Corpus:
    """Reads the standard library's source as a corpus of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return _text_corpus(stdlib_files(root), f"source of Python {platform.python_version()}")


def read_tokens(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Maps token files, .npy or raw (native byte order), each a stream of its own.

    Args:
        patterns: Files or globs.
        config: `dtype` (required for raw files), `length`, and `separator`.
        key: Config key of the patterns, for messages.

    Returns:
        The corpus; its ids are read from the files when examples need them.

    Raises:
        UserError: A pattern does not match any file, or files are not one-dimensional arrays of ids of the right type,
            or too short for one example; all files are checked first.
    """
    problems, documents = [], []
    for file in find_files(patterns, key=key, suffixes=(".npy", *RAW_SUFFIXES)):
        try:
            ids = _map_npy(file.path, config.dtype) if file.path.suffix == ".npy" else _map_raw(file.path, config.dtype)
            if len(ids) <= config.length:
                raise UserError(
                    f"its {len(ids):,} tokens are too few for one example: data.length + 1 = {config.length + 1:,}."
                )
        except UserError as error:
            problems.append(f"{key}: {file.path}: {error}")
        else:
            documents.append(Document(file.name.encode(), np.asarray(ids), file.name, mapped=True))
    raise_problems(problems)
    size = f"{counted(len(documents), 'file')}, {sum(len(document.ids) for document in documents):,} tokens"
    return Corpus(documents, config.document_end, None, f"token files ({size})")


def _map_npy(path: Path, dtype: str) -> np.ndarray:
    """Returns a .npy file as a memory map."""
    try:
        ids = np.load(path, mmap_mode="r")
    except Exception as error:  # NumPy raises any of several types for invalid content
        raise_system_error(error)
        raise UserError(f"it cannot be read as .npy: {reason_of(error)}. Write integers with np.save.") from None
    if not isinstance(ids, np.ndarray):
        raise UserError("it is an archive of arrays (.npz). Save the token ids alone, with np.save.")
    if ids.dtype.kind not in "ui" or ids.ndim != 1:
        raise UserError(
            f"token ids must be integers with one dim, got {ids.dtype} of shape {ids.shape}. Save "
            "ids.astype(np.uint32).reshape(-1)."
        )
    if dtype and ids.dtype != dtype:
        raise UserError(f"it has {ids.dtype}, but data.dtype={dtype}; leave data.dtype out: .npy files have a dtype.")
    return ids


def _map_raw(path: Path, dtype: str) -> np.ndarray:
    """Returns a raw file as a memory map."""
    if not dtype:
        raise UserError("a raw file does not state its dtype; set data.dtype to uint8, uint16 or uint32.")
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise UserError(
            f"its {size:,} bytes must be a multiple of {width}, the size of {dtype}: {size:,} % {width} = "
            f"{size % width}. Check data.dtype, and that the file is complete."
        )
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
