"""Text files become bytes with a 0 after each document."""

import numpy as np
import pytest
import spmdkit.data.sources.texts.text as text
from spmdkit.data import DataConfig, open_splits


def test_round_trip(corpus):
    splits = open_splits(DataConfig(source="text", files=(f"{corpus}/**/*.txt",), length=20, eval_fraction=0.0))
    read = b"".join(splits.train[i]["inputs"].astype(np.uint8).tobytes() for i in range(len(splits.train)))
    paths = sorted(corpus.rglob("*.txt"), key=lambda path: path.relative_to(corpus).as_posix())
    written = b"".join(path.read_bytes() + b"\0" for path in paths)
    assert read == written[: len(read)]
    assert len(written) - len(read) <= 20
    assert splits.vocabulary == 256
    assert splits.evaluation is None


def test_splits_are_disjoint_documents(corpus):
    splits = open_splits(DataConfig(source="text", files=(f"{corpus}/**/*.txt",), length=300, eval_fraction=0.1))
    assert splits.evaluation is not None
    assert len(splits.evaluation) == pytest.approx(20, abs=10)
    assert len(splits.train) + len(splits.evaluation) == pytest.approx(200, abs=3)


def test_big_files_are_mapped_and_never_joined(corpus, monkeypatch):
    monkeypatch.setattr(text, "MAPPED_BYTES", 250)
    config = DataConfig(source="text", files=(f"{corpus}/**/*.txt",), length=99, eval_fraction=0.0)
    splits = open_splits(config)
    assert len(splits.train) == 200 * 3  # 300 bytes are 3 windows of 99 + 1 each, and files are not joined
    first = sorted(corpus.rglob("*.txt"))[0].read_bytes()
    assert splits.train[0]["inputs"].astype(np.uint8).tobytes() == first[:99]


def test_files_of_the_evaluation_split(corpus):
    config = DataConfig(
        source="text", files=(f"{corpus}/part0/*.txt",), eval_files=(f"{corpus}/part1/*.txt",), length=30
    )
    splits = open_splits(config)
    first = sorted((corpus / "part1").glob("*.txt"))[0].read_bytes()
    assert splits.evaluation is not None
    assert splits.evaluation[0]["inputs"].astype(np.uint8).tobytes() == first[:30]


def test_a_larger_vocabulary_may_be_asked_for(corpus):
    config = {"source": "text", "files": (f"{corpus}/**/*.txt",), "length": 30}
    assert open_splits(DataConfig(**config, vocabulary=512)).vocabulary == 512
    with pytest.raises(ValueError, match=r"data\.vocabulary=100: text is bytes, and they need 256 ids"):
        open_splits(DataConfig(**config, vocabulary=100))


def test_no_match_names_the_key(corpus):
    with pytest.raises(ValueError, match=r"data\.eval_files: .* matches no file"):
        open_splits(DataConfig(source="text", files=(f"{corpus}/**/*.txt",), eval_files=(f"{corpus}/*.no",)))
