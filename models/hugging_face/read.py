"""From a folder of Hugging Face to a transformer and its parameters, which stay in the files until asked for."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths, map_with_path
from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from ...parallel.model import BlockModel, Params
from ..transformer import transformer
from ..transformer_config import TransformerConfig
from .config_json import NAME, read_config, read_object
from .families import FAMILIES, NO_WEIGHTS, Family, Stored, without_prefix
from .safetensors import open_arrays
from .stacked import Stacked

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_LISTED = 10
"""Arrays listed in one message."""


class Loaded(NamedTuple):
    """What a folder holds.

    Attributes:
        config: The sizes and choices of the transformer.
        model: The transformer.
        params: Its parameters, for `step.init(seed, params)`: read-only memory maps, and `Stacked` ones for blocks.
    """

    config: TransformerConfig
    model: BlockModel
    params: Params


def load(folder: str | Path, *, length: int = 0, **options: Any) -> Loaded:
    """Opens a folder; reads its config and the headers of its files, and no weights.

    Args:
        folder: With config.json, and model.safetensors or model.safetensors.index.json and the files it names.
        length: Positions in a row, for counting operations; 0 = as many as the model was made for.
        **options: Options of the transformer that no file gives: `dropout`, `scan_unroll`.

    Returns:
        The transformer and its parameters. Logits are those of `transformers`, up to rounding. Every process maps the
        same files; what is asked for is read.

    Raises:
        UserError: The folder or a file cannot be read, is of no family here, or asks for what the transformer does not
            have; an array is missing, is too many, or has another shape.
    """
    folder = Path(folder)
    config = transformer_config(folder, length=length, **options)
    model = transformer(config)
    return Loaded(config, model, load_params(folder, model))


def transformer_config(folder: Path, *, length: int = 0, **options: Any) -> TransformerConfig:
    """The transformer that a folder's config.json describes; arguments and errors are those of `load`."""
    content = read_config(folder)
    made_for = content.get("max_position_embeddings") or content.get("n_positions") or 0
    given = family_in(folder).options(content)
    known: dict[str, Any] = {**given, "length": length or made_for, **options}
    return TransformerConfig(**known)


def family_in(folder: Path) -> Family:
    """The family of a folder's config.json.

    Raises:
        UserError: It names none that there is here.
    """
    kind = read_config(folder).get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"{folder / NAME}: model_type={kind!r} is no family that can be loaded."
            + did_you_mean(kind, FAMILIES, otherwise="There are")
        )
    return FAMILIES[kind]


def load_params(folder: Path, model: BlockModel) -> Params:
    """The parameters of a folder's transformer, as `Loaded.params`.

    Raises:
        UserError: An array is missing, is too many, or has another shape; all at once.
    """
    family, arrays = family_in(folder), _arrays_in(folder)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    used: set[str] = set()
    problems: list[str] = []

    def find(stored: Stored, block: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """One array of the files, as the parameter (of one block) is; None where there is a problem."""
        name = stored.name.format(block)
        name = name if name in arrays else without_prefix(name)
        if name not in arrays:
            problems.append(f"{stored.name.format(block)} is missing.")
            return None
        used.add(name)
        array, wanted = arrays[name], _stored_shape(stored, shape)
        if list(array.shape) != wanted:
            problems.append(f"{name} is {list(array.shape)}; {NAME} makes it {wanted}.")
            return None
        which, columns = stored.part[0], shape[-1]
        return (array.T if stored.turned else array)[..., which * columns : (which + 1) * columns]

    def parameter(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        stored = family.stored[path]
        if "{}" not in stored.name:
            return find(stored, 0, leaf.shape)
        found = [find(stored, block, leaf.shape[1:]) for block in range(leaf.shape[0])]
        blocks = [array for array in found if array is not None]
        return Stacked(blocks) if len(blocks) == len(found) else None

    params = map_with_path(parameter, abstract)
    idle = _idle(arrays, used, abstract)
    problems += [f"{name} is no array of a {family.model_type} of these sizes." for name in idle]
    if problems:
        more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        first = f"{folder} does not hold the model of its {NAME}:"
        raise UserError("\n  ".join([first, *problems[:MAX_LISTED], *more]))
    return params


def _idle(arrays: Mapping[str, np.ndarray], used: set[str], abstract: Params) -> list[str]:
    """Arrays that nothing has asked for; a tied head may be stored beside its table."""
    tied = "head/logits" not in dict(leaves_with_paths(abstract))
    return [
        name
        for name in arrays
        if name not in used and not NO_WEIGHTS.search(name) and not (tied and name == "lm_head.weight")
    ]


def _stored_shape(stored: Stored, shape: tuple[int, ...]) -> list[int]:
    shape = (*shape[:-1], shape[-1] * stored.part[1])
    return list(reversed(shape) if stored.turned else shape)


def _arrays_in(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a folder's files, mapped into memory."""
    if (folder / ONE_FILE).is_file():
        return open_arrays(folder / ONE_FILE)
    if not (folder / INDEX).is_file():
        other = " (pytorch_model.bin is: save it again with save_pretrained)" if _has_pickles(folder) else ""
        raise UserError(f"{folder}: neither {ONE_FILE} nor {INDEX} is there{other}.")
    index = read_object(folder / INDEX).get("weight_map", {})
    if not isinstance(index, dict) or not all(map(_is_file_name, index.values())):
        raise UserError(f"{folder / INDEX}: weight_map must be an object that maps names of arrays to names of files.")
    missing = sorted({file for file in index.values() if not (folder / file).is_file()})
    if missing:
        raise UserError(f"{folder}: {INDEX} names files that are not there: {', '.join(missing)}.")
    opened = functools.cache(lambda file: open_arrays(folder / file))
    wrong = [name for name, file in index.items() if name not in opened(file)]
    if wrong:
        raise UserError(f"{folder}: {INDEX} says that {wrong[0]} is in {index[wrong[0]]}; it is not.")
    return {name: opened(file)[name] for name, file in index.items()}


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value


def _has_pickles(folder: Path) -> bool:
    return any(folder.glob("pytorch_model*.bin*"))
