"""A directory of images with one subdirectory for each class."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from spmdkit.data import BadDataError, DataConfig, open_splits
from spmdkit.data.source import take


def write(path: Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    """Writes an image of one color, `size` as width x height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(path)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Forty images of each of two classes; the red value of an image is its number."""
    for number in range(80):
        write(tmp_path / "photos" / ("dog" if number % 2 else "cat") / f"{number:02}.png", number)
    (tmp_path / "photos" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path / "photos"


def config(folder: Path, **options) -> DataConfig:
    return DataConfig(source="images", files=(str(folder),), **options)


def test_subdirectories_are_classes(photos):
    splits = open_splits(config(photos, eval_fraction=0.25))
    assert splits.evaluation is not None
    assert len(splits.evaluation) == pytest.approx(20, abs=12)
    seen = {}
    for split in (splits.train, splits.evaluation):
        for index in range(len(split)):
            example = split[index]
            assert example["inputs"].shape == (4, 6, 3)
            assert example["inputs"].dtype == np.float32
            seen[round(float(example["inputs"][0, 0, 0]) * 255)] = int(example["targets"])
            assert float(example["inputs"][0, 0, 2]) == 1.0
            assert (example["weights"].dtype, float(example["weights"])) == (np.float32, 1.0)
    assert seen == {number: number % 2 for number in range(80)}
    assert splits.description.startswith("images: inputs, targets, weights; ")
    assert splits.description.endswith(" examples, 4 x 6 x 3, 2 classes")


def test_a_new_image_moves_no_other_between_the_splits(photos):
    def held_out() -> set[str]:
        evaluation = open_splits(config(photos, eval_fraction=0.25)).evaluation
        return {evaluation.origin(index) for index in range(len(evaluation))}  # type: ignore[union-attr]

    before = held_out()
    write(photos / "ant" / "00.png", 3)
    assert before <= held_out()


def test_gray_images_have_one_channel_and_are_scaled(tmp_path):
    write(tmp_path / "photos" / "a" / "1.PNG", 51, (8, 8), "L")
    write(tmp_path / "photos" / "b" / "2.png", 102, (5, 9), "L")
    splits = open_splits(config(tmp_path / "photos", image_size=4, eval_fraction=0.0))
    batch = take(splits.train, np.array([1, 0]))
    assert batch["inputs"].shape == (2, 4, 4, 1)
    np.testing.assert_allclose(batch["inputs"][:, 0, 0, 0], [0.4, 0.2], rtol=1e-6)
    assert batch["targets"].tolist() == [1, 0]


def test_evaluation_directory_has_the_same_classes(photos, tmp_path):
    write(tmp_path / "held-out" / "dog" / "1.png", 7)
    splits = open_splits(config(photos, eval_files=(str(tmp_path / "held-out"),)))
    assert (len(splits.train), int(splits.evaluation[0]["targets"])) == (80, 1)  # type: ignore[index]
    write(tmp_path / "held-out" / "bird" / "1.png", 7)
    with pytest.raises(ValueError, match=r"data\.eval_files: class 'bird' is not in data\.files \(cat, dog\)"):
        open_splits(config(photos, eval_files=(str(tmp_path / "held-out"),)))


def test_rejects_images_of_different_sizes(photos):
    write(photos / "cat" / "00.png", 1, (5, 5))
    write(photos / "dog" / "01.png", 1, (7, 5))
    with pytest.raises(
        BadDataError, match=r"it has .*\(4, 6, 3\)\).*, but the first record has .*\(5, 5, 3\)\).* Set data\.image_size"
    ):
        open_splits(config(photos, eval_fraction=0.0))


def test_a_damaged_image_is_left_out_up_to_the_limit(photos, capsys):
    (photos / "dog" / "79.png").write_bytes((photos / "dog" / "79.png").read_bytes()[:40])
    with pytest.raises(BadDataError, match=r"79\.png: it cannot be read: "):
        open_splits(config(photos, eval_fraction=0.0))
    splits = open_splits(config(photos, eval_fraction=0.0, bad_records=1))
    assert (float(splits.train[79]["weights"]), float(splits.train[78]["weights"])) == (0.0, 1.0)
    assert "79.png" in capsys.readouterr().err


def test_the_fingerprint_follows_names_and_content(photos):
    def fingerprint() -> str:
        return open_splits(config(photos, eval_fraction=0.0)).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    (photos / "cat" / "00.png").rename(photos / "cat" / "000.png")  # the same bytes in the same order
    assert (renamed := fingerprint()) != first
    write(photos / "cat" / "000.png", 9)
    assert fingerprint() != renamed


@pytest.mark.parametrize(
    ("folder", "message"), [("missing", "missing is not a directory"), ("photos/cat", "lacks images in subdirectories")]
)
def test_rejects_directories_without_classes(folder, message, photos, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_splits(config(tmp_path / folder))
