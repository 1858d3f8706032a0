"""A directory of images with one subdirectory for each class.

    photos/cat/1.jpg, photos/cat/2.jpg, photos/dog/3.png    data.files: [photos]

    inputs     float32 (height, width, channels) from 0 to 1; 1 channel if the first image is gray, otherwise 3
    targets    int32 (), the number of the subdirectory in sorted order

Images stay in their files. A batch decodes its own with Pillow.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted
from ..config import DataConfig
from ..source import BadDataError, Splits, divide_rows, fingerprint
from .file_examples import UNREADABLE, Records, make_file_splits
from .source_files import explain_missing, raise_system_error, reason_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def read_images(config: DataConfig) -> Splits:
    """Opens a directory of images; its subdirectories are the classes.

    Args:
        config: `files` (directories), and `eval_files` (directories with the same classes) or `eval_fraction` (images
            are held out by the hash of their name); `image_size`; `bad_records`, the maximum number of images that each
            process leaves out.

    Raises:
        UserError: A directory is missing or lacks images in subdirectories, the two splits have other classes, a
            split is empty, or Pillow is not installed.
        BadDataError: An image cannot be decoded or has another size than the first.
    """
    paths = _find(config.files, "data.files")
    classes = sorted({path.parent.name for path in paths})
    if config.eval_files:
        held_out = _find(config.eval_files, "data.eval_files")
        unknown = sorted({path.parent.name for path in held_out} - set(classes))
        if unknown:
            raise UserError(f"data.eval_files: class {unknown[0]!r} is not in data.files ({', '.join(classes)}).")
        rows = [np.arange(len(paths)), len(paths) + np.arange(len(held_out))]
        paths += held_out
    else:
        rows = divide_rows(len(paths), config.eval_fraction, [_name(path).encode() for path in paths])
    mode = _color_mode(paths[0])
    size = config.image_size

    def decode(row: int, content: bytes) -> dict[str, np.ndarray]:
        with _pillow().open(io.BytesIO(content)) as image:
            pixels = image.convert(mode)
        if size and pixels.size != (size, size):
            pixels = pixels.resize((size, size))
        inputs = np.asarray(pixels, np.float32).reshape(pixels.height, pixels.width, -1) / np.float32(255)
        return {"inputs": inputs, "targets": np.array(classes.index(paths[row].parent.name), np.int32)}

    fix = "Set data.image_size to scale all images to one size"
    records = Records(lambda row: paths[row].read_bytes(), decode, lambda row: str(paths[row]), fix)
    splits = make_file_splits(records, rows, config)
    shape = " x ".join(map(str, splits.train[0]["inputs"].shape))
    description = f"{splits.description}, {shape}, {counted(len(classes), 'class', 'classes')}"
    names_of_splits = []
    for rows_of_split in rows:
        names_of_splits.append([_name(paths[row]) for row in rows_of_split])
    content = fingerprint((), splits.fingerprint, names_of_splits)
    return splits._replace(description=description, fingerprint=content)


def _find(directories: Sequence[str], key: str) -> list[Path]:
    """Returns the images in the subdirectories of some directories, sorted by class and name."""
    images: list[Path] = []
    for directory in directories:
        folder = Path(directory).expanduser()
        if not folder.is_dir():
            raise UserError(f"{key}: {directory} is not a directory. Give one with a subdirectory for each class.")
        for path in folder.glob("*/*"):
            if path.suffix.lower() in SUFFIXES and path.is_file():
                images.append(path)
    if not images:
        raise UserError(
            f"{key}: {', '.join(directories)} lacks images in subdirectories ({', '.join(SUFFIXES)}). Put the images "
            "of each class into a subdirectory named after the class."
        )
    return sorted(images, key=lambda path: (_name(path), str(path)))


def _name(path: Path) -> str:
    """Returns class and file name, which do not depend on the machine."""
    return f"{path.parent.name}/{path.name}"


def _color_mode(first: Path) -> str:
    """Returns Pillow's color mode of all examples, from the first image."""
    try:
        with _pillow().open(first) as image:
            return "L" if image.mode in ("1", "L", "LA") else "RGB"
    except UNREADABLE as error:
        raise_system_error(error)
        raise BadDataError(f"{first}: it cannot be read: {reason_of(error)}.") from None


def _pillow() -> Any:
    with explain_missing("data.source=images", "Pillow", "images"):
        from PIL import Image
    return Image
