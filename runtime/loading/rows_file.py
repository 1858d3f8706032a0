"""Writes rows of arrays batch by batch as one .npz file, with at most one batch in memory.

Each array is first written to a file of its own beside the target; a .npz file is a zip archive of these files.
"""

import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from ...checkpoints.export import SAVED_BY, check_target, npy_dtype
from ...configs.config_sources import is_run_directory
from ...mesh.errors import UserError
from ...mesh.files import absolute_path, atomic_write
from ...training.run_files import own_file


def check_rows_file(target: Path, *, force: bool) -> Path:
    """Checks that rows can be written to a file, before anything is computed.

    Args:
        target: The file; its name ends in .npz.
        force: Whether an earlier file of predictions may be replaced.

    Returns:
        Its absolute path.

    Raises:
        UserError: It cannot be written.
    """
    target = absolute_path(target)
    if target.suffix != ".npz":
        raise UserError(f"{target}: predictions are written as .npz. Use a name such as {target.stem}.npz.")
    if target.is_dir():
        raise UserError(f"{target} is a directory. Give the name of a file.")
    for folder in Path(os.path.realpath(target)).parents:
        if is_run_directory(folder) and (own := own_file(folder, target)):
            raise UserError(f"{target} is below {own}, which belongs to the run in {folder}. Choose another path.")
    check_target(target, force=force)
    return target


def write_rows(target: Path, num_rows: int, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, tuple[int, ...]]:
    """Writes rows batch by batch; dtypes that NumPy does not support become float32.

    Args:
        target: The result of `check_rows_file`.
        num_rows: The number of rows of all batches together.
        batches: Name -> rows, the same names in each.

    Returns:
        Name of an array -> its shape.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, IO[bytes]] = {}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as name:
        folder = Path(name)
        with ExitStack() as stack:
            for batch in batches:
                for array_name, rows in batch.items():
                    rows = np.ascontiguousarray(rows, npy_dtype(rows.dtype))
                    if array_name not in files:
                        shapes[array_name] = (num_rows, *rows.shape[1:])
                        files[array_name] = stack.enter_context((folder / str(len(files))).open("xb"))
                        header = {**np.lib.format.header_data_from_array_1_0(rows), "shape": shapes[array_name]}
                        np.lib.format.write_array_header_1_0(files[array_name], header)
                    files[array_name].write(rows.data if rows.size else b"")
        with atomic_write(target) as partial, zipfile.ZipFile(partial, "x", zipfile.ZIP_STORED) as archive:
            archive.comment = SAVED_BY.encode()
            for number, array_name in enumerate(files):
                spooled = folder / str(number)
                archive.write(spooled, f"{array_name}.npy")
                spooled.unlink()
    return shapes
