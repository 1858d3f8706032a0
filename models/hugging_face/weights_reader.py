"""Hugging Face directories as a transformer and its parameters, which are read from the files on demand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Lt

from ...layouts.paths import map_with_path
from ...mesh.errors import UserError, did_you_mean, raise_problems
from ...mesh.files import check_local
from ...parallel.model import BlockModel, Params
from ...parallel.options import LocalPath
from ..transformer import transformer
from ..transformer_config import Count, Positive, TransformerConfig
from .config_json import NAME, read_config, read_object
from .families import FAMILIES, Family, Stored, without_prefix
from .redundant_arrays import redundancy_problem
from .safetensors import open_arrays


class Stacked:
    """The arrays of the blocks as one, stacked on a new dim 0; indexing reads only the indexed part into memory.

    The index of dim 0 is a slice, an integer or an array of integers; those of other dims are any of NumPy's.
    `np.asarray` reads everything.

    Attributes:
        shape: (number of arrays, *shape of each).
        dtype: The dtype of each.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        """Stacks arrays.

        Args:
            arrays: At least one, usually memory maps or views of them.

        Raises:
            UserError: They differ in shape or dtype.
        """
        self._arrays = list(arrays)
        first = self._arrays[0]
        self.shape = (len(self._arrays), *first.shape)
        self.dtype = first.dtype
        for number, array in enumerate(self._arrays):
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise UserError(
                    f"Block {number} is {array.dtype}{list(array.shape)}, but block 0 "
                    f"{first.dtype}{list(first.shape)}; all blocks must be the same."
                )

    @property
    def ndim(self) -> int:
        """The number of dims, with the first."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        chosen = np.arange(len(self._arrays))[rows]
        if np.ndim(chosen) == 0:
            return np.asarray(self._arrays[int(chosen)][tuple(rest)])
        parts = [self._arrays[number][tuple(rest)] for number in chosen]
        return np.stack(parts) if parts else np.empty((0, *self._arrays[0][tuple(rest)].shape), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("The blocks are separate arrays, which need a copy to become one.")
        return np.asarray(self[:], dtype)

    def __repr__(self) -> str:
        return f"Stacked({self.dtype}{list(self.shape)})"


ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
MAX_LISTED = 10
"""Arrays listed in one message."""


class Loaded(NamedTuple):
    """The content of a directory.

    Attributes:
        config: The sizes and options of the transformer.
        model: The transformer.
        params: The parameters, for `step.init(seed, params)`: read-only memory maps, and `Stacked` ones for blocks.
    """

    config: TransformerConfig
    model: BlockModel
    params: Params


def load(folder: str | Path, *, length: int = 0, ignore_keys: Sequence[str] = (), **options: Any) -> Loaded:
    """Opens a directory; reads its config and the headers of its files, but not the weights.

    Args:
        folder: A directory with config.json, and model.safetensors or model.safetensors.index.json and the files it
            names.
        length: Positions in a row, for counting operations; 0 = the maximum of the model.
        ignore_keys: Keys of config.json to ignore, because they do not change the logits.
        **options: Options of the transformer that are not in the files: `dropout`, `scan_unroll`.

    Returns:
        The transformer and its parameters. Logits are those of `transformers`, up to rounding. Every process maps the
        same files and reads parts on demand.

    Raises:
        UserError: The directory or a file cannot be read, is not of a supported family, or has unsupported, unknown or
            contradictory options; an array is missing, unknown, has another shape or no float dtype, or contradicts
            what the transformer computes instead of reading it.
    """
    check_local(folder, "folder")
    folder = Path(folder)
    config = transformer_config(folder, length=length, ignore_keys=ignore_keys, **options)
    return Loaded(config, transformer(config), load_params(folder, config))


def transformer_config(folder: Path, **options: Any) -> TransformerConfig:
    """Returns the transformer of a directory's config.json; arguments and errors are those of `load`."""
    return family_in(folder).transformer(read_config(folder), **options)


def family_in(folder: Path) -> Family:
    """Returns the family of a directory's config.json.

    Raises:
        UserError: The family is not supported.
    """
    kind = str(read_config(folder).get("model_type"))
    if kind not in FAMILIES:
        raise UserError(
            f"{folder / NAME}: unsupported model_type={kind!r}." + did_you_mean(kind, FAMILIES, otherwise="Choose from")
        )
    return FAMILIES[kind]


def load_params(folder: Path, config: TransformerConfig) -> Params:
    """Returns the parameters of a directory's transformer, see `Loaded.params`.

    Args:
        folder: The directory.
        config: The transformer of its config.json.

    Raises:
        UserError: An array is missing, unknown, has another shape or no float dtype, or contradicts what the
            transformer computes instead of reading it; all at once. Or the directory has an adapter.
    """
    _check_no_adapter(folder)
    family = family_in(folder)
    arrays = _arrays_in(folder)
    abstract = jax.eval_shape(transformer(config).init, jax.random.key(0))
    used: set[str] = set()
    problems: list[str] = []

    def find(stored: Stored, block: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns one array of the files in the form of the parameter (of one block); None if there is a problem."""
        name = stored.name.format(block)
        name = name if name in arrays else without_prefix(name)
        if name not in arrays:
            problems.append(f"{stored.name.format(block)} is missing.")
            return None
        used.add(name)
        array = arrays[name]
        expected = stored.shape(shape)
        if array.shape != expected:
            problems.append(f"{name} is {list(array.shape)}; {NAME} requires {list(expected)}.")
            return None
        if not jnp.issubdtype(array.dtype, jnp.floating):
            problems.append(f"{name} has the dtype {array.dtype}; weights must have a float dtype.")
            return None
        which, columns = stored.part[0], shape[-1]
        return (array.T if stored.transposed else array)[..., which * columns : (which + 1) * columns]

    def parameter(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        stored = family.stored[path]
        if "{}" not in stored.name:
            return find(stored, 0, leaf.shape)
        found = [find(stored, block, leaf.shape[1:]) for block in range(leaf.shape[0])]
        blocks = [array for array in found if array is not None]
        return Stacked(blocks) if len(blocks) == len(found) else None

    params = map_with_path(parameter, abstract)
    for name, array in arrays.items():
        if name in used:
            continue
        problem = redundancy_problem(name, array, family.model_type, config, params["embed"]["tokens"])
        if problem:
            problems.append(problem)
    raise_problems(problems, f"{folder} does not match its {NAME}:", MAX_LISTED)
    return params


def _check_no_adapter(folder: Path) -> None:
    """Raises a UserError if the directory has an adapter, which `transformers` adds to the weights."""
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder} has an adapter ({ADAPTER}), which would be left out. Merge it into the weights first: "
            "`model.merge_and_unload().save_pretrained(...)` of peft."
        )


def _arrays_in(folder: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a directory's files, mapped into memory.

    Raises:
        UserError: The files are missing, cannot be read, or contain other arrays than the index names.
    """
    has_index = (folder / INDEX).is_file()
    if not has_index and (folder / ONE_FILE).is_file():
        return open_arrays(folder / ONE_FILE)
    if not has_index:
        has_pickles = any(folder.glob("pytorch_model*.bin*"))
        other = " (pytorch_model.bin does: save it again with save_pretrained)" if has_pickles else ""
        raise UserError(f"{folder}: neither {ONE_FILE} nor {INDEX} exists{other}.")
    index = read_object(folder / INDEX).get("weight_map", {})
    if not isinstance(index, dict) or any(Path(str(file)).name != file for file in index.values()):
        raise UserError(f"{folder / INDEX}: weight_map must map names of arrays to names of files.")
    files = sorted(set(index.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{folder}: {INDEX} names missing files: {', '.join(missing)}.")
    if ONE_FILE not in files and (folder / ONE_FILE).is_file():
        raise UserError(
            f"{folder} contains both {ONE_FILE} and {INDEX}, which names other files. Remove those that are not the "
            "model's."
        )
    opened = {file: open_arrays(folder / file) for file in files}
    for name, file in index.items():
        if name not in opened[file]:
            raise UserError(f"{folder}: {INDEX} maps {name} to {file}, which does not contain it.")
    for file, arrays in opened.items():
        for name in arrays:
            if index.get(name) != file:
                raise UserError(
                    f"{folder}: {file} contains {name}, which {INDEX} does not map to it. Correct the index, or remove "
                    "the array."
                )
    return {name: opened[file][name] for name, file in index.items()}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A transformer with the sizes of a Hugging Face directory; training starts from its weights."""

    folder: LocalPath = ""
    """Directory with config.json and .safetensors files (Llama, Qwen2, Qwen3 or GPT-2), below run.root."""
    vocabulary: Count = 0
    """Number of different tokens in the data, at most the directory's; 0 = the data's."""
    length: Count = 0
    """Positions in a row, for counting operations; 0 = the data's."""
    weights: bool = True
    """Start training from the directory's weights; false draws new ones."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction of the values dropped after the embedding and after each half of a block; 0 <= dropout < 1."""
    scan_unroll: Positive = 1
    """Blocks in one iteration of the loop over blocks, as in the transformer."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of config.json that the transformer does not know, and that do not change the logits."""


def configured_transformer(config: HuggingFaceConfig) -> TransformerConfig:
    """Returns the transformer of the directory of a config; errors are those of `transformer_config`."""
    check_local(config.folder, "model.folder")
    return transformer_config(
        Path(config.folder),
        length=config.length,
        ignore_keys=config.ignore_keys,
        dropout=config.dropout,
        scan_unroll=config.scan_unroll,
    )


def hugging_face(config: HuggingFaceConfig) -> BlockModel:
    """Builds the transformer of a directory.

    The headers of the files are read too, so that mismatches are reported before compilation.

    Raises:
        UserError: The directory is missing, cannot be read, is not of a supported family, does not match its
            config.json, or has fewer tokens than the data.
    """
    if not config.folder:
        raise UserError("model.folder is missing. Give a directory with config.json and .safetensors files.")
    sizes = configured_transformer(config)
    if config.vocabulary > sizes.vocabulary:
        raise UserError(
            f"The data has {config.vocabulary} tokens, but model.folder={config.folder} {sizes.vocabulary}. Tokenize "
            "the data with the model's own tokenizer."
        )
    if config.weights:
        load_params(Path(config.folder), sizes)
    return transformer(sizes)
