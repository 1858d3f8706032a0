"""A directory of images with one subdirectory for each class.

    photos/cat/1.jpg, photos/cat/2.jpg, photos/dog/3.png    data.files: [photos]

    inputs     float32 (height, width, channels) from 0 to 1; 1 channel if the first image is gray, otherwise 3
    targets    int32 (), the number of the subdirectory in sorted order

Images stay in their files. A batch decodes its own with Pillow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted
from ..config import DataConfig
from ..source import BadDataError, Splits, fingerprint, spread_indices
from .source_files import BadRecords, explain_missing, raise_system_error, reason_of
from .texts import hash_fraction

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SAMPLED = 64
"""Images, evenly spread, that are decoded when the data is opened, and whose bytes are part of the fingerprint."""


class ImageSource:
    """Images in files, decoded when a batch needs them.

    An image that cannot be decoded has weight 0 and keeps its place in the order.

    Args:
        paths: The files.
        targets: int32 (images,), the class of each.
        shape: Height, width and channels of every example.
        resize: Scale images to `shape`; otherwise each must have this size.
        bad: Counts images that cannot be decoded.
    """

    def __init__(
        self, paths: Sequence[Path], targets: np.ndarray, shape: tuple[int, int, int], resize: bool, bad: BadRecords
    ) -> None:
        self._paths, self._targets, self._shape, self._resize, self._bad = paths, targets, shape, resize, bad

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Decodes image `index`.

        Raises:
            BadDataError: It cannot be decoded or has another size, and the limit of bad records is reached.
        """
        path, weight = self._paths[index], 1.0
        try:
            inputs = self._decode(path)
        except (ValueError, SyntaxError, OSError) as error:  # Pillow raises all three for damaged files
            raise_system_error(error)
            self._bad.leave_out(str(path), f"cannot be decoded: {reason_of(error)}.")
            inputs, weight = np.zeros(self._shape, np.float32), 0.0
        return {"inputs": inputs, "targets": self._targets[index], "weights": np.float32(weight)}  # pyright: ignore[reportReturnType]

    def origin(self, index: int) -> str:
        """Returns the file of example `index`."""
        return str(self._paths[index])

    def _decode(self, path: Path) -> np.ndarray:
        height, width, channels = self._shape
        with _pillow().open(path) as image:
            pixels = image.convert("L" if channels == 1 else "RGB")
        if pixels.size != (width, height):
            if not self._resize:
                raise ValueError(
                    f"it has {pixels.height} x {pixels.width} pixels, and the first image has {height} x {width}. "
                    "Set data.image_size to scale all images to one size"
                )
            pixels = pixels.resize((width, height))
        return np.asarray(pixels, np.float32).reshape(self._shape) / np.float32(255)


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
    found = _find(config.files, "data.files")
    classes = sorted({each.parent.name for each in found})
    if config.eval_files:
        held_out = _find(config.eval_files, "data.eval_files")
        if unknown := sorted({each.parent.name for each in held_out} - set(classes)):
            raise UserError(
                f"data.eval_files: class {unknown[0]!r} is not in data.files, which has {', '.join(classes)}."
            )
        parts = [found, held_out]
    else:
        is_held_out = [hash_fraction(_name(path).encode()) < config.eval_fraction for path in found]
        parts = [[path for path, out in zip(found, is_held_out, strict=True) if out == side] for side in (False, True)]
        parts = parts if config.eval_fraction else parts[:1]
    sizes = " and ".join(f"{len(part):,}" for part in parts)
    if not all(parts):
        raise UserError(
            f"data.eval_fraction={config.eval_fraction} of {len(found):,} images gives {sizes} images for training and "
            "evaluation: both need some. Give more images, change data.eval_fraction, or set it to 0."
        )
    shape, bad = _shape(found[0], config.image_size), BadRecords(config.bad_records, BadDataError)
    targets = [np.array([classes.index(path.parent.name) for path in part], np.int32) for part in parts]
    resize = bool(config.image_size)
    sources = [ImageSource(part, each, shape, resize, bad) for part, each in zip(parts, targets, strict=True)]
    sampled = []
    for part, source in zip(parts, sources, strict=True):
        for index in spread_indices(len(part), SAMPLED):
            source[index]
            sampled.append(np.frombuffer(part[index].read_bytes(), np.uint8))
    form = f"{shape[0]} x {shape[1]} x {shape[2]}, {counted(len(classes), 'class', 'classes')}"
    return Splits(
        train=sources[0],
        evaluation=sources[1] if len(sources) > 1 else None,
        vocabulary=None,
        description=f"images: {form}; {sizes} examples",
        fingerprint=fingerprint(sampled, shape, [[_name(path) for path in part] for part in parts]),
    )


def _find(directories: Sequence[str], key: str) -> list[Path]:
    """Returns the images in the subdirectories of some directories, sorted by class and name."""
    for directory in directories:
        if not Path(directory).expanduser().is_dir():
            raise UserError(
                f"{key}: {directory} is not a directory. Give a directory with one subdirectory for each class."
            )
    found = [
        path
        for directory in directories
        for path in Path(directory).expanduser().glob("*/*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    if not found:
        raise UserError(
            f"{key}: {', '.join(directories)} lacks images in subdirectories ({', '.join(SUFFIXES)}). Put the images "
            "of each class into a subdirectory named after the class."
        )
    return sorted(found, key=lambda path: (_name(path), str(path)))


def _name(path: Path) -> str:
    """Returns class and file name, which do not depend on the machine."""
    return f"{path.parent.name}/{path.name}"


def _shape(first: Path, size: int) -> tuple[int, int, int]:
    """Returns height, width and channels of every example, from the first image."""
    try:
        with _pillow().open(first) as image:
            channels = 1 if image.mode in ("1", "L", "LA") else 3
            return (size or image.height), (size or image.width), channels
    except (ValueError, SyntaxError, OSError) as error:
        raise BadDataError(f"{first}: cannot be decoded: {reason_of(error)}.") from None


def _pillow() -> Any:
    with explain_missing("data.source=images", "Pillow", "images"):
        from PIL import Image
    return Image
