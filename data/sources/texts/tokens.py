"""Arrays of token ids, memory-mapped: .npy files, and raw files of uint8, uint16 or uint32 (native byte order)."""

from pathlib import Path

import numpy as np

from ....mesh.errors import UserError
from ....mesh.text import counted
from ...config import DataConfig
from ..files import FoundFile, find_files
from .documents import Corpus, Document

RAW_SUFFIXES = (".bin", ".raw", ".dat")
NO_SEPARATOR = np.zeros(0, np.uint8)


def token_separator(config: DataConfig) -> np.ndarray:
    """The id that ends a document of token ids, or none."""
    return NO_SEPARATOR if config.separator < 0 else np.array([config.separator], np.uint32)


def read_tokens(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Maps token files, each one stream of its own.

    Args:
        patterns: Files or globs.
        config: `dtype` (needed for raw files), `length`, and `separator`.
        key: Config key of the patterns, for messages.

    Returns:
        The corpus; its ids are read from the files only where examples need them.

    Raises:
        UserError: a pattern matches nothing, or files are not one-dimensional arrays of ids of the right type, or
            too short for one example; all files are checked first.
    """
    files = find_files(patterns, key=key, suffixes=(".npy", *RAW_SUFFIXES))
    problems, documents = [], []
    for file in files:
        try:
            ids = _map_npy(file.path, config.dtype) if file.path.suffix == ".npy" else _map_raw(file.path, config.dtype)
            _check_length(ids, config.length)
        except UserError as error:
            problems.append(f"{key}: {file.path}: {error}")
        else:
            documents.append(_document(file, ids))
    if problems:
        raise UserError("\n".join(problems))
    num_tokens = sum(len(document.ids) for document in documents)
    separator = token_separator(config)
    return Corpus(documents, separator, None, f"token files ({counted(len(documents), 'file')}, {num_tokens:,} tokens)")


def _document(file: FoundFile, ids: np.ndarray) -> Document:
    return Document(file.name.encode(), np.asarray(ids), file.name, mapped=True)


def _map_npy(path: Path, dtype: str) -> np.ndarray:
    """A .npy file as a memory map."""
    try:
        ids = np.load(path, mmap_mode="r")
    except (OSError, MemoryError) as error:
        if isinstance(error, MemoryError) or error.errno is not None:
            raise
        raise UserError(f"it cannot be read as .npy: {error}. Write it with np.save.") from None
    except Exception as error:  # whatever parsing garbage raises; objects are refused, since they are programs
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise UserError(f"it cannot be read as .npy: {reason}. Write it with np.save, an array of integers.") from None
    if not isinstance(ids, np.ndarray):
        raise UserError("it is an archive of arrays (.npz). Save the token ids alone, with np.save.")
    if ids.dtype.kind not in "ui":
        raise UserError(
            f"it holds {ids.dtype} of shape {ids.shape}; token ids are integers. Save ids.astype(np.uint32), once you "
            "have made sure that these are ids."
        )
    if ids.ndim != 1:
        raise UserError(
            f"it holds {ids.dtype} of shape {ids.shape}; token ids are integers in one dim. Save ids.reshape(-1)."
        )
    if dtype and ids.dtype != dtype:
        raise UserError(f"it holds {ids.dtype}, but data.dtype={dtype}; leave data.dtype out, .npy files know theirs.")
    return ids


def _map_raw(path: Path, dtype: str) -> np.ndarray:
    """A raw file as a memory map."""
    if not dtype:
        raise UserError("a raw file does not know its type; set data.dtype to uint8, uint16 or uint32.")
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise UserError(
            f"its {size:,} bytes are no whole number of {dtype}: {size:,} % {width} = {size % width}. "
            "Check data.dtype, and that the file is complete."
        )
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)


def _check_length(ids: np.ndarray, length: int) -> None:
    if len(ids) <= length:
        raise UserError(f"its {len(ids):,} tokens are too few for one example: data.length + 1 = {length + 1:,}.")
