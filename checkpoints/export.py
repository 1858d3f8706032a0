"""`spmdkit export`: the arrays of a checkpoint as files that other programs read.

    out.safetensors     one file; bfloat16 stays bfloat16; the header contains step and model
    out                 a directory of .npy files, one for each array, to be mapped into memory

Names are the paths of the parameters; those of a module of another library, and of its state, are that library's (see
models/adapters/libraries.py). Low-rank adapters are merged into what they adapt, or stay beside it. Blocks are in the
model's order, as in every checkpoint, whatever stages they were trained on, and stacked along dim 0. If NumPy has no
dtype (bfloat16, 8-bit floats), .npy files contain the same values as float32. Every array is compared with its
checksum, and one array at a time is in memory. The target appears when it is complete. A directory lists its files in
spmdkit-export.json: --force replaces only what an export wrote.
"""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..layouts.sizes import counted, format_bytes
from ..mesh.errors import UserError
from ..mesh.files import absolute_path, atomic_write, check_replaceable
from ..models.adapters.libraries import groups_of, own_name
from ..models.hugging_face.safetensors import write_arrays
from ..models.lora import NAME
from .directory import display_path
from .integrity import ByteProgress
from .restore import StoredCheckpoint

PARAMETERS = "params/"
BESIDE = f"/{NAME}/"
KINDS = {"safetensors": ".safetensors", "npy": ""}
"""The kinds of export -> the suffix of the file or directory."""
MARK = "spmdkit-export.json"
"""File in an exported directory that lists its files; --force replaces a directory only if it contains nothing else."""
SAVED_BY = "spmdkit"
"""Mark of an exported file: in the header of .safetensors, in the comment of the .npz of `spmdkit predict`."""
ADAPTERS = MERGED, SEPARATE = ("merged", "separate")
"""The choices for low-rank adapters."""


class Exported(NamedTuple):
    """The result of an export.

    Attributes:
        path: The file or directory.
        arrays: The number of arrays.
        num_bytes: Their bytes.
        widened: The number of arrays that became float32.
    """

    path: Path
    arrays: int
    num_bytes: int
    widened: int

    def __str__(self) -> str:
        wide = f"; {self.widened} of them as float32, since NumPy does not have their dtype" if self.widened else ""
        return (
            f"Wrote {display_path(self.path)}: {counted(self.arrays, 'array')}, {format_bytes(self.num_bytes)}{wide}."
        )


class _Source(NamedTuple):
    """An array to export.

    Attributes:
        stored: Its path in the checkpoint.
        adapters: The paths of A and B to merge into it, or ().
        name: Its name in the export.
    """

    stored: str
    adapters: tuple[str, ...]
    name: str


def export(
    stored: StoredCheckpoint,
    target: Path,
    *,
    whole_state: bool = False,
    lora: str = MERGED,
    force: bool = False,
    ema: bool = False,
) -> Exported:
    """Writes the arrays of a checkpoint.

    Args:
        stored: The checkpoint.
        target: A name that ends in .safetensors, or a directory to create.
        whole_state: If True, also exports the optimizer's state, the step and the key; names then begin with params/,
            opt_state/.
        lora: "merged" merges low-rank adapters into what they adapt, "separate" exports them beside it; they are
            separate in a whole state.
        force: If True, replaces what an earlier export wrote there, and nothing else.
        ema: If True, exports the averages of the parameters (`optimizer.ema`) under the names of the parameters; frozen
            parameters, which have none, are exported as they are.

    Raises:
        UserError: The target exists or is invalid; there is nothing to export; two arrays would have one name; or
            averages are missing.
        DamagedCheckpoint: An array is damaged; nothing is left behind.
        CheckpointUnavailable: The machine or the file system cannot read it.
        OSError: The target cannot be written; nothing is left behind.
    """
    target = absolute_path(target)
    if target.suffix not in KINDS.values():
        raise UserError(
            f"{target} ends in {target.suffix!r}: export writes .safetensors, or a directory of .npy files, whose name "
            "has no suffix."
        )
    check_target(target, force=force)
    if ema and whole_state:
        raise UserError("--whole-state exports parameters and averages, each under its own name. Omit --ema.")
    if lora not in ADAPTERS:
        raise UserError(f"lora={lora!r}: low-rank adapters are {' or '.join(ADAPTERS)}.")
    stored.check_order()
    sources = _sources(stored, whole_state, merge=lora == MERGED and not whole_state, ema=ema)
    if not sources:
        raise UserError(f"{stored.folder} contains no parameters. Give --whole-state to export everything.")
    if twice := [name for name, number in Counter(source.name for source in sources).items() if number > 1]:
        raise UserError(f"Two arrays of {stored.folder} would have the name {twice[0]!r}. Give --whole-state.")
    write = _write_safetensors if target.suffix == ".safetensors" else _write_directory
    with atomic_write(target) as partial:
        widened = write(stored, sources, partial)
    return Exported(target, len(sources), stored.num_bytes(*(source.stored for source in sources)), widened)


def add_suffix(kind: str | None, target: Path) -> Path:
    """Returns the name of an export with the suffix of its kind.

    Args:
        kind: One of KINDS; None if the name determines it.
        target: The name; without a suffix, that of its kind is added.

    Raises:
        UserError: It has the suffix of another kind.
    """
    if kind is None or target.suffix == KINDS[kind]:
        return target
    if target.suffix:
        wanted = KINDS[kind] or "no suffix: it is a directory"
        raise UserError(f"--to {kind} and {target}: a name of that kind has {wanted}. Omit --to, or rename it.")
    return target.with_name(f"{target.name}{KINDS[kind]}")


def check_target(target: Path, *, force: bool) -> None:
    """Checks that a file or directory can be written, and that only an earlier export would be replaced.

    Args:
        target: An absolute path.
        force: True if an earlier export may be replaced.

    Raises:
        UserError: It exists and may not be replaced, its directory is missing, or it is among the checkpoints of a run.
    """
    if not target.parent.is_dir():
        raise UserError(f"The directory {target.parent} for {target.name} is missing. Create it first.")
    for each in (target.parent, target.parent.parent):
        if each.name == "checkpoints" and (each.parent / "config.yaml").is_file():
            run = each.parent
            raise UserError(f"{target} is among the checkpoints of the run {run}. Choose a name outside of {run}.")
    if not os.path.lexists(target):
        return
    if not force:
        raise UserError(f"{target} exists. Choose another name, or give --force to replace it if an export wrote it.")
    check_replaceable(target)
    if not (_is_exported_directory(target) if target.is_dir() else _is_exported_file(target)):
        what = "directory, or contains other files as well" if target.is_dir() else "file"
        raise UserError(
            f"{target} is not an exported {what}: --force replaces only what an earlier export wrote. Choose another "
            "name, or move it away."
        )


def _is_exported_directory(folder: Path) -> bool:
    try:
        listed = set(json.loads((folder / MARK).read_bytes())["files"]) | {MARK}
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return {each.relative_to(folder).as_posix() for each in folder.rglob("*") if not each.is_dir()} <= listed


def _is_exported_file(file: Path) -> bool:
    with file.open("rb") as opened:
        begin = opened.read(100)
    if begin[8:].startswith(f'{{"__metadata__":{{"saved_by":"{SAVED_BY}"'.encode()):
        return True
    return zipfile.is_zipfile(file) and zipfile.ZipFile(file).comment == SAVED_BY.encode()


def _sources(stored: StoredCheckpoint, whole_state: bool, *, merge: bool, ema: bool) -> list[_Source]:
    """Returns the arrays to export, the widest dtype first: then each array is aligned in one file."""
    library = str(stored.about.get("library", ""))
    averages = {f"{PARAMETERS}{path}": average for path, average in stored.averages().items()} if ema else {}
    adapters = _adapters(stored) if merge else {}
    sources = []
    for path in stored.arrays:
        is_parameter = whole_state or path.split("/")[0] in groups_of(library)
        if not is_parameter or (adapters and BESIDE in path):
            continue
        name = path if whole_state else own_name(library, path)
        pair = tuple(averages.get(each, each) for each in adapters.get(path, ()))
        sources.append(_Source(averages.get(path, path), pair, name))
    return sorted(sources, key=lambda source: -stored.arrays[source.stored].dtype.itemsize)


def _adapters(stored: StoredCheckpoint) -> dict[str, tuple[str, str]]:
    """Returns the path of an adapted parameter -> those of its A and B, if the run trained adapters.

    Raises:
        UserError: The checkpoint does not contain their scale.
    """
    found = {}
    for path in stored.arrays:
        if path.startswith(PARAMETERS) and path.endswith("/a") and BESIDE in path:
            folder = path.removesuffix("/a")
            group, _, adapted = folder.partition(BESIDE)
            found[f"{group}/{adapted}"] = (f"{folder}/a", f"{folder}/b")
    if found and "lora_scale" not in stored.about:
        raise UserError(
            f"{stored.folder} contains low-rank adapters, but not the scale of their product (model.lora.alpha / "
            "rank), which only a run of a config records. Give --lora separate."
        )
    return found if stored.about.get("lora_scale") is not None else {}


def _read(stored: StoredCheckpoint, sources: list[_Source], what: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the exported arrays with their names, in order; reads small sources together, and merges adapters."""
    progress = ByteProgress(what, stored.num_bytes(*(source.stored for source in sources)))
    by_path = {source.stored: source for source in sources}
    for group in stored.groups(by_path):
        arrays = stored.read(group)
        for path in group:
            source, array = by_path[path], arrays.pop(path)
            progress.add(array.nbytes)
            if source.adapters:
                a, b = stored.read(source.adapters).values()
                array = _merge(array, a, b, float(stored.about["lora_scale"]))
            yield source.name, array


def _merge(array: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Adds the product of the adapters to what they adapt, in float32 or wider, one block at a time."""
    merged = np.empty_like(array)
    wide = np.float64 if array.dtype == np.float64 else np.float32
    for block in np.ndindex(array.shape[:-2]):
        product = a[block].astype(wide) @ b[block].astype(wide)
        merged[block] = (array[block].astype(wide) + scale * product).astype(array.dtype)
    return merged


def _write_safetensors(stored: StoredCheckpoint, sources: list[_Source], path: Path) -> int:
    about = {"saved_by": SAVED_BY, "step": str(stored.step), "model": str(stored.about.get("model", ""))}
    abstract = {source.name: stored.arrays[source.stored] for source in sources}
    write_arrays(path, abstract, (array for _, array in _read(stored, sources, path.stem)), about)
    return 0


def _write_directory(stored: StoredCheckpoint, sources: list[_Source], path: Path) -> int:
    path.mkdir()
    widened, files = 0, []
    for name, array in _read(stored, sources, path.stem):
        dtype = npy_dtype(array.dtype)
        widened += dtype != array.dtype
        files.append(f"{name}.npy")
        (path / files[-1]).parent.mkdir(parents=True, exist_ok=True)
        with (path / files[-1]).open("xb") as file:  # `np.save` would lose the system's error of a full disk
            array = np.ascontiguousarray(array, dtype).reshape(array.shape)
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data if array.size else b"")
    mark = json.dumps({"saved_by": SAVED_BY, "files": sorted(files)}, indent=1)
    (path / MARK).write_text(f"{mark}\n", encoding="utf-8")
    return widened


def npy_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in a .npy file: float32 for dtypes that NumPy would read back as plain bytes."""
    return dtype if dtype.kind in "biufc" else np.dtype(np.float32)
