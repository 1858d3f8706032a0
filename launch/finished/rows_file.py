"""Rows of arrays, written batch by batch as one .npz: no more than a batch is in memory.

Each array goes into a file of its own first, beside the target; a .npz is a zip archive of these, whose members are
written one after the other.
"""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from ...configs.run_folders import is_run_folder
from ...layouts.sizes import counted, format_bytes
from ...mesh.errors import UserError
from ...mesh.files import absolute_path, atomic_write
from ...training.run_files import own_file
from ..inspection.export import SAVED_BY, check_target
from ..inspection.finding import shown
from ..inspection.npy import npy_dtype, npy_header

COPIED_BYTES = 1 << 20


class Written(NamedTuple):
    """What was written.

    Attributes:
        path: the file.
        shapes: name of an array -> its shape.
        num_bytes: of all arrays.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    num_bytes: int

    def __str__(self) -> str:
        each = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.shapes.items())
        arrays = counted(len(self.shapes), "array")
        return f"Wrote {shown(self.path)}: {each}; {arrays}, {format_bytes(self.num_bytes)}."


def check_rows_file(target: Path, *, force: bool) -> Path:
    """Looks whether rows can be written to a file, before anything is computed.

    Args:
        target: The file; its name ends in .npz.
        force: Whether an earlier file of predictions may be replaced.

    Returns:
        Its absolute path.

    Raises:
        UserError: They cannot.
    """
    target = absolute_path(target)
    if target.suffix != ".npz":
        raise UserError(f"{target}: what is predicted is written as .npz. Give a name such as {target.stem}.npz.")
    if target.is_dir():
        raise UserError(f"{target} is a folder. Give the name of a file.")
    for folder in Path(os.path.realpath(target)).parents:
        if is_run_folder(folder) and (own := own_file(folder, target)):
            raise UserError(f"{target} is below {own}, which belongs to the run in {folder}. Choose another path.")
    check_target(target, force=force)
    return target


def write_rows(target: Path, num_rows: int, batches: Iterable[Mapping[str, np.ndarray]]) -> Written:
    """Writes rows batch after batch; what NumPy has no dtype for becomes float32.

    Args:
        target: From `check_rows_file`.
        num_rows: Of all batches together.
        batches: Name -> rows, the same names in each.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, IO[bytes]] = {}
    num_bytes = 0
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as name:
        folder = Path(name)
        try:
            for batch in batches:
                for array_name, rows in batch.items():
                    rows = np.ascontiguousarray(rows, npy_dtype(rows.dtype))
                    if array_name not in files:
                        shapes[array_name] = (num_rows, *rows.shape[1:])
                        files[array_name] = (folder / str(len(files))).open("xb")
                        files[array_name].write(npy_header(shapes[array_name], rows.dtype))
                    files[array_name].write(rows.data if rows.size else b"")
                    num_bytes += rows.nbytes
        finally:
            for file in files.values():
                file.close()
        with atomic_write(target) as partial, zipfile.ZipFile(partial, "x", zipfile.ZIP_STORED) as archive:
            archive.comment = SAVED_BY.encode()
            for number, array_name in enumerate(files):
                spooled = folder / str(number)
                with archive.open(f"{array_name}.npy", "w", force_zip64=True) as member, spooled.open("rb") as source:
                    shutil.copyfileobj(source, member, COPIED_BYTES)
                spooled.unlink()
    return Written(target, shapes, num_bytes)
