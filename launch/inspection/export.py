"""`spmdkit checkpoint export`: the arrays of a checkpoint as files that other programs read.

    out.safetensors     one file; bfloat16 stays bfloat16; the header says step and model
    out                 a folder of .npy files, one for each array, to be mapped into memory

Names are the paths of the parameters; those of a module of another library, and of its state, are that library's (see
models/adapters/own_names.py). Low-rank adapters are merged into what they adapt, or stay beside it. Blocks come in the
model's order, which is how checkpoints keep them, whatever stages they were trained on; stacked along dim 0, or each
block by itself. What NumPy has no dtype for (bfloat16, 8-bit floats) becomes float32 in .npy, which holds the same
values. Every array is compared with its checksum on the way, and nothing has the name that was asked for before all of
it is written. A folder lists its files in spmdkit-export.json: only what an export wrote is ever replaced.
"""

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...configs.run_folders import run_of_checkpoint
from ...layouts.paths import in_blocks
from ...layouts.sizes import array_bytes, counted, format_bytes
from ...mesh.errors import UserError
from ...mesh.files import absolute_path, atomic_write, check_replaceable
from ...models.adapters.own_names import groups_of, own_name
from ...models.hugging_face.safetensors import Entry, allocate, mapped
from .averages import AveragedCheckpoint
from .finding import shown
from .merged import BESIDE, PARAMETERS, MergedCheckpoint
from .npy import npy_dtype, npy_header
from .progress import Progress
from .stored import StoredArray, StoredCheckpoint

KINDS = {"safetensors": ".safetensors", "npy": ""}
"""What can be written -> how the name of the file, or of the folder, ends."""
MARK = "spmdkit-export.json"
"""File in an exported folder that lists what was written; --force replaces a folder only if it has nothing else."""
SAVED_BY = "spmdkit"
"""Mark of an exported file: in the header of .safetensors, in the comment of .npz."""
ADAPTERS = MERGED, SEPARATE = ("merged", "separate")
"""What becomes of low-rank adapters."""


class Exported(NamedTuple):
    """What was written.

    Attributes:
        path: the file or folder.
        arrays: how many.
        num_bytes: of them.
        widened: how many became float32.
    """

    path: Path
    arrays: int
    num_bytes: int
    widened: int

    def __str__(self) -> str:
        wide = f"; {self.widened} of them, which NumPy has no dtype for, as float32" if self.widened else ""
        return f"Wrote {shown(self.path)}: {counted(self.arrays, 'array')}, {format_bytes(self.num_bytes)}{wide}."


class _Piece(NamedTuple):
    """An array to be written: a stored one, or one block of it.

    Attributes:
        name: in what is written.
        source: the stored array.
        block: which of its first dim; None for all.
    """

    name: str
    source: StoredArray
    block: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape if self.block is None else self.source.shape[1:]


def export(
    stored: StoredCheckpoint,
    target: Path,
    *,
    whole_state: bool = False,
    unstack: bool = False,
    lora: str = MERGED,
    force: bool = False,
    ema: bool = False,
) -> Exported:
    """Writes the arrays of a checkpoint.

    Args:
        stored: The checkpoint.
        target: Ends in .safetensors, or is a folder to be made.
        whole_state: The optimizer's state, the step and the key as well; names then begin with params/, opt_state/.
        unstack: Each block by itself: "blocks/3/query" in place of row 3 of "blocks/query".
        lora: Low-rank adapters "merged" into what they adapt, or "separate"; in a whole state they are separate.
        force: Replace what an earlier export wrote there, and nothing else.
        ema: The averages of the parameters (`optimizer.ema`) in place of the parameters, under their names; what was
            frozen has none, and is written as it is.

    Raises:
        UserError: The target is there already, or cannot be; there is nothing to export; or there are no averages.
        DamagedCheckpoint: An array is damaged; nothing is left behind.
        CheckpointUnavailable: The machine or the file system does not let it be read.
        OSError: The target cannot be written; nothing is left behind.
    """
    target = absolute_path(target)
    if target.suffix not in KINDS.values():
        raise UserError(
            f"{target} ends in {target.suffix!r}: export writes .safetensors, or a folder of .npy files, whose name "
            "has no ending."
        )
    check_target(target, force=force)
    if ema and whole_state:
        raise UserError("--whole-state holds parameters and averages, each under its own name. Leave --ema out.")
    stored = _with_adapters(AveragedCheckpoint(stored) if ema else stored, SEPARATE if whole_state else lora)
    pieces = list(_pieces(stored, whole_state, unstack))
    _check(stored, pieces)
    write = _safetensors if target.suffix == ".safetensors" else _folder
    progress = Progress(f"{target.name}", sum(piece.source.nbytes for piece in pieces if not piece.block))
    with atomic_write(target) as partial:
        write(stored, pieces, partial, progress)
    widened = 0 if target.suffix == ".safetensors" else sum(npy_dtype(p.source.dtype) != p.source.dtype for p in pieces)
    return Exported(target, len(pieces), sum(Entry(p.name, p.shape, p.source.dtype).nbytes for p in pieces), widened)


def named_for(kind: str | None, target: Path) -> Path:
    """The name of what is written, with the ending of its kind.

    Args:
        kind: One of KINDS; None where the name says it.
        target: As it was given; without an ending it gets that of its kind.

    Raises:
        UserError: It ends in that of another kind.
    """
    if kind is None or target.suffix == KINDS[kind]:
        return target
    if target.suffix:
        asked = KINDS[kind] or "no ending: it is a folder"
        raise UserError(f"--to {kind} and {target}: a name of that kind has {asked}. Leave --to out, or rename it.")
    return target.with_name(f"{target.name}{KINDS[kind]}")


def check_target(target: Path, *, force: bool) -> None:
    """Checks that a file or folder can be written, and that nothing but an earlier export would be replaced.

    Args:
        target: Absolute.
        force: Whether an earlier export may be replaced.

    Raises:
        UserError: It exists and may not be replaced, its folder is missing, or it is among the checkpoints of a run.
    """
    if not target.parent.is_dir():
        raise UserError(f"There is no folder {target.parent} to write {target.name} into. Make it first.")
    run = run_of_checkpoint(target.parent)
    if run is not None:
        raise UserError(f"{target} is among the checkpoints of the run {run}. Choose a name outside of {run}.")
    if not os.path.lexists(target):
        return
    if not force:
        raise UserError(
            f"{target} is there already. Choose another name, or give --force to replace it if an export wrote it."
        )
    check_replaceable(target)
    if not (_is_exported_folder(target) if target.is_dir() else _is_exported_file(target)):
        what = "folder, or contains other files as well" if target.is_dir() else "file"
        raise UserError(
            f"{target} is not an exported {what}: --force replaces only what an earlier export wrote. Choose another "
            "name, or move it away."
        )


def _is_exported_folder(folder: Path) -> bool:
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


def _check(stored: StoredCheckpoint, pieces: list[_Piece]) -> None:
    """Raises a UserError where there is nothing to write, or two arrays would have one name."""
    if not pieces:
        raise UserError(f"{stored.folder} holds no parameters. Give --whole-state to export what it does hold.")
    twice = [name for name, count in Counter(piece.name for piece in pieces).items() if count > 1]
    if twice:
        raise UserError(f"Two arrays of {stored.folder} would have the name {twice[0]!r}. Give --whole-state.")


def _with_adapters(stored: StoredCheckpoint, lora: str) -> StoredCheckpoint:
    """A checkpoint as it is, or with its adapters merged, where it has any.

    Raises:
        UserError: It was saved before checkpoints said what adapters are multiplied by.
    """
    if lora not in ADAPTERS:
        raise UserError(f"lora={lora!r}: low-rank adapters are {' or '.join(ADAPTERS)}.")
    if lora == SEPARATE:
        return stored
    has_adapters = any(path.startswith(PARAMETERS) and BESIDE in path for path in stored.names)
    scale = stored.about.get("lora_scale")
    if not has_adapters or (scale is None and "lora_scale" in stored.about):
        return stored
    if scale is None:
        raise UserError(
            f"{stored.folder} holds low-rank adapters, but not what their product is multiplied by "
            "(model.lora.alpha / rank), as an earlier version saved it. Give --lora separate."
        )
    return MergedCheckpoint(stored, float(scale))


def _pieces(stored: StoredCheckpoint, whole_state: bool, unstack: bool) -> Iterator[_Piece]:
    library = str(stored.about.get("library", ""))
    for path, array in stored.arrays.items():
        if not (whole_state or path.split("/")[0] in groups_of(library)):
            continue
        name = path if whole_state else own_name(library, path)
        is_blocks = path.startswith(PARAMETERS) and in_blocks(path.removeprefix(PARAMETERS)) and not library
        if not (unstack and is_blocks):
            yield _Piece(name, array, None)
            continue
        front, _, rest = name.partition("blocks/")
        for number in range(array.shape[0]):
            yield _Piece(f"{front}blocks/{number}/{rest}", array, number)


def _fill(
    stored: StoredCheckpoint, pieces: list[_Piece], targets: Callable[[_Piece], np.ndarray], progress: Progress
) -> None:
    """Reads every stored array once, part by part, into the arrays of its pieces."""
    by_source: dict[str, list[_Piece]] = {}
    for piece in pieces:
        by_source.setdefault(piece.source.path, []).append(piece)
    for path, of_it in by_source.items():
        arrays = [targets(piece) for piece in of_it]
        for region, part in stored.parts(path):
            progress.add(part.nbytes)
            if of_it[0].block is None:
                arrays[0][region] = part
                continue
            for number in range(region[0].start, region[0].stop):
                arrays[number][region[1:]] = part[number - region[0].start]


def _safetensors(stored: StoredCheckpoint, pieces: list[_Piece], path: Path, progress: Progress) -> None:
    about = {"saved_by": SAVED_BY, "step": str(stored.step), "model": str(stored.about.get("model", ""))}
    entries = [Entry(piece.name, piece.shape, piece.source.dtype) for piece in pieces]
    with mapped(path, entries, about) as arrays:
        _fill(stored, pieces, lambda piece: arrays[piece.name], progress)


def _folder(stored: StoredCheckpoint, pieces: list[_Piece], path: Path, progress: Progress) -> None:
    path.mkdir()

    def target(piece: _Piece) -> np.ndarray:
        file = path / f"{piece.name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        dtype = npy_dtype(piece.source.dtype)
        begin = npy_header(piece.shape, dtype)
        allocate(file, begin, array_bytes(piece.shape, dtype))
        return np.memmap(file, dtype, "r+", len(begin), piece.shape)

    _fill(stored, pieces, target, progress)
    files = sorted(f"{piece.name}.npy" for piece in pieces)
    (path / MARK).write_text(json.dumps({"saved_by": SAVED_BY, "files": files}, indent=1) + "\n", encoding="utf-8")
