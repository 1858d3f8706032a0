"""Parameters of a transformer as a directory that `transformers` loads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import differing_leaves, in_blocks, leaves_with_paths
from ...layouts.sizes import array_bytes
from ...mesh.errors import UserError, raise_problems
from ...mesh.files import atomic_write, check_local
from ...parallel.model import Params
from ...parallel.step.model_order import in_model_order
from ...parallel.step.state import TrainState
from ..transformer import transformer
from ..transformer_config import TransformerConfig
from .config_json import NAME, read_config
from .families import Stored, family_of
from .keys_without_effect import DTYPE, has_no_effect
from .safetensors import write_arrays
from .weights_reader import INDEX, ONE_FILE

BESIDE = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab.json",
)
"""Files that are copied from `like`."""


def save(
    folder: str | Path,
    config: TransformerConfig,
    params: Params | TrainState,
    *,
    dtype: Any = None,
    max_file_bytes: int = 5 << 30,
    like: str | Path | None = None,
) -> None:
    """Writes config.json and .safetensors files atomically.

    Arrays are read from the devices one by one, a block at a time.

    Args:
        folder: The new directory; it must not exist.
        config: The transformer.
        params: The state of a step, or parameters in the model's order of blocks, as in a checkpoint or from `load`.
            Stages of a pipeline may store blocks in another order: give their state. JAX arrays must be on devices of
            this process.
        dtype: The dtype of the files; None for that of each parameter.
        max_file_bytes: The maximum size of a file; more files have an index.
        like: A directory to copy tokenizer files from, and those keys of config.json that do not change the logits,
            such as special tokens.

    Raises:
        UserError: The options do not match a family; the directory exists; the parameters do not match the model, are
            spread over processes, or have an unsupported dtype.
        OSError: The disk is full.
    """
    check_local(folder, "folder")
    if like is not None:
        check_local(like, "like")
    folder = Path(folder)
    family = family_of(config)
    if isinstance(params, TrainState):
        params = in_model_order(params._replace(opt_state=(), extra=())).params
    leaves = _checked(config, params)
    if folder.exists():
        raise UserError(f"{folder} already exists. Give another directory, or remove it.")
    content = {"architectures": [family.architecture], "model_type": family.model_type, **family.fields.content(config)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder) as partial:
        partial.mkdir()
        stored = _stored_arrays(leaves, family.stored)
        abstract = {name: _abstract(pieces[0], dtype) for name, pieces in stored.items()}
        widest = max((leaf.dtype for leaf in abstract.values()), key=lambda dtype: (dtype.itemsize, dtype.name))
        _write_config(partial, {**content, "torch_dtype": widest.name}, None if like is None else Path(like))
        _write_files(partial, abstract, stored, max_file_bytes)


def _checked(config: TransformerConfig, params: Params) -> dict[str, Any]:
    """Returns the parameters by path, after checking them."""
    expected = dict(leaves_with_paths(jax.eval_shape(transformer(config).init, jax.random.key(0))))
    leaves = dict(leaves_with_paths(params))
    differing = differing_leaves(leaves, expected, lambda leaf: str(list(leaf.shape)))
    wrong = [f"{path} is {given}; the model's is {own}." for path, given, own in differing]
    wrong += [
        f"{path} is spread over several processes. Save a checkpoint, and write from it in one process."
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    raise_problems(wrong, "Parameters that cannot be written:")
    return {path: leaves[path] for path in expected}


class _Piece(NamedTuple):
    """A parameter, or one block of it, as a part of a stored array."""

    stored: Stored
    leaf: Any
    block: int | None


def _stored_arrays(leaves: dict[str, Any], names: Mapping[str, Stored]) -> dict[str, list[_Piece]]:
    """Returns the pieces of each stored array, in order, by its name."""
    found: dict[str, list[_Piece]] = {}
    for path, leaf in leaves.items():
        for block in range(leaf.shape[0]) if in_blocks(path) else [None]:
            found.setdefault(names[path].name.format(block), []).append(_Piece(names[path], leaf, block))
    return {name: sorted(pieces, key=lambda piece: piece.stored.part) for name, pieces in found.items()}


def _abstract(piece: _Piece, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the stored array that a piece is a part of."""
    shape = piece.leaf.shape if piece.block is None else piece.leaf.shape[1:]
    return jax.ShapeDtypeStruct(piece.stored.shape(shape), jnp.dtype(dtype or piece.leaf.dtype))


def _write_files(
    folder: Path, abstract: dict[str, jax.ShapeDtypeStruct], stored: dict[str, list[_Piece]], max_file_bytes: int
) -> None:
    sizes = {name: array_bytes(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
    files, weight_map = _split(sizes, max_file_bytes), {}
    for number, names in enumerate(files, 1):
        file = ONE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        ordered = {name: abstract[name] for name in sorted(names, key=lambda name: -abstract[name].dtype.itemsize)}
        arrays = (_assemble(stored[name], leaf.dtype) for name, leaf in ordered.items())
        write_arrays(folder / file, ordered, arrays, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Distributes arrays over files of at most `most` bytes, in order; a larger array has its own file."""
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[each] for each in files[-1]) + size > most:
            files.append([])
        files[-1].append(name)
    return files


def _assemble(pieces: list[_Piece], dtype: Any) -> np.ndarray:
    """Returns a stored array made of its pieces, which are ranges of columns."""
    parts = [np.asarray(leaf if block is None else leaf[block]) for _, leaf, block in pieces]
    columns = np.concatenate(parts, axis=-1).astype(dtype)
    return columns.T if pieces[0].stored.transposed else columns


def _write_config(folder: Path, content: dict[str, Any], like: Path | None) -> None:
    """Writes config.json, with the keys of `like` that cannot contradict the content; and copies its other files."""
    if like is not None:
        copied = {key: value for key, value in read_config(like).items() if has_no_effect(key) and key not in DTYPE}
        content = {**copied, **content}
        for pattern in BESIDE:
            for file in like.glob(pattern):
                shutil.copyfile(file, folder / file.name)
    (folder / NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
