"""What `open_splits` refuses, and what identifies the data."""

import sys

import numpy as np
import pytest
from spmdkit.data import DataConfig, Splits, from_arrays, open_splits
from spmdkit.data.source import fingerprint, take


def config(corpus, **options):
    return DataConfig(**({"source": "text", "files": (f"{corpus}/**/*.txt",), "length": 30} | options))


def test_description_says_what_there_is(corpus):
    splits = open_splits(config(corpus))
    assert splits.evaluation is not None
    assert splits.description == (
        f"text: text files (200 files, 60,000 bytes); {len(splits.train):,} training and {len(splits.evaluation):,} "
        "evaluation examples of 30 tokens, vocabulary 256"
    )


@pytest.mark.parametrize("other", [{"length": 31}, {"eval_fraction": 0.2}, {"vocabulary": 300}])
def test_the_fingerprint_changes_with_how_data_is_cut(corpus, other):
    assert open_splits(config(corpus)).fingerprint == open_splits(config(corpus)).fingerprint
    assert open_splits(config(corpus)).fingerprint != open_splits(config(corpus, **other)).fingerprint


def test_the_fingerprint_changes_with_the_data(corpus):
    before = open_splits(config(corpus)).fingerprint
    (corpus / "part0" / "000.txt").write_bytes(b"x" * 301)
    assert open_splits(config(corpus)).fingerprint != before


def test_the_fingerprint_covers_every_byte_of_what_is_not_huge():
    array = np.zeros((1 << 16, 2, 300), np.uint8)[:, 1]  # 19 MiB, not contiguous
    before = fingerprint([array])
    for place in ((0, 0), (5, 7), (40_000, 1), (65_535, 299)):
        array[place] = 1
        assert fingerprint([array]) != before
        array[place] = 0
    assert fingerprint([array]) == before
    assert fingerprint([array[:-1]]) != before
    assert fingerprint([array.astype(np.int8)]) != before
    assert fingerprint([array], 3) != fingerprint([array], 4)
    assert fingerprint([array[:1], array[1:]]) != before


def test_the_fingerprint_samples_blocks_of_what_is_huge(tmp_path):
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(1 << 40)
    huge = np.memmap(tmp_path / "huge.bin", np.uint16, mode="r+")
    small = np.zeros(100_000, np.uint8)
    before = fingerprint([huge, small])
    step = (len(huge) - (1 << 15)) / 511
    for place in (0, 2047, len(huge) - 1, int(100 * step) + 77, int(510 * step)):
        huge[place] = 1
        assert fingerprint([huge, small]) != before
        huge[place] = 0
    small[-1] = 1  # its ends are read, however little it is beside the other
    assert fingerprint([huge, small]) != before
    small[-1] = 0
    huge[1_000_000] = 1  # between the blocks: not looked at, as its docstring says
    assert fingerprint([huge, small]) == before


def test_too_little_to_train_on(corpus):
    with pytest.raises(ValueError) as caught:
        open_splits(config(corpus, length=10**6))
    train, evaluation = str(caught.value).splitlines()
    assert "data: the training split holds" in train
    assert "one example needs data.length + 1 = 1,000,001 in one piece. Give more data or lower data.length." in train
    assert "the evaluation split (data.eval_fraction=0.05) holds" in evaluation


def test_empty_evaluation_split(corpus):
    with pytest.raises(
        ValueError, match=r"the evaluation split \(data\.eval_fraction=1e-05\) holds .* set data\.eval_fraction: 0"
    ):
        open_splits(config(corpus, eval_fraction=1e-5))
    assert open_splits(config(corpus, eval_fraction=0.0)).evaluation is None


def test_empty_evaluation_files(corpus):
    (corpus / "short.eval").write_text("short")
    with pytest.raises(ValueError, match=r"the evaluation split \(data\.eval_files\) holds 6 tokens"):
        open_splits(config(corpus, eval_files=(f"{corpus}/*.eval",)))


def test_synthetic_digits():
    splits = open_splits(DataConfig(source="synthetic", eval_fraction=0.25))
    assert splits.evaluation is not None
    assert (len(splits.train) + len(splits.evaluation), splits.vocabulary) == (8192, None)
    batch = take(splits.train, np.arange(len(splits.train)))
    assert batch["inputs"].shape[1:] == (64,)
    assert np.bincount(batch["targets"]) == pytest.approx(614, rel=0.15)
    means = np.stack([batch["inputs"][batch["targets"] == digit].mean(0) for digit in range(10)])
    nearest = np.argmin(((batch["inputs"][:500, None] - means) ** 2).sum(-1), axis=1)
    assert 0.3 < np.mean(nearest == batch["targets"][:500]) < 0.9  # learnable, and not by averages alone
    assert open_splits(DataConfig(source="synthetic", eval_fraction=0.25)).fingerprint == splits.fingerprint


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_data.py").write_text(
        "import numpy as np\n"
        "from spmdkit.data import from_arrays\n"
        "def mine(config):\n"
        "    return from_arrays({'inputs': np.zeros((config.length, 2)), 'targets': np.zeros(config.length)})\n"
        "def wrong(config):\n"
        "    return 3\n"
        "def weightless(config):\n"
        "    return mine(config)._replace(train=[{'inputs': np.zeros(2)}])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("user_data", None)


@pytest.mark.usefixtures("user_module")
def test_the_users_own_function():
    splits = open_splits(DataConfig(source="user_data:mine", length=7))
    assert isinstance(splits, Splits)
    assert len(splits.train) == 7


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("user_data:wrong", r"data\.source='user_data:wrong' returned a int; it returns spmdkit\.data\.Splits"),
        ("user_data:weightless", r"returned examples with inputs; each also needs \"weights\": float32"),
        ("user_data:wrnog", r"user_data\.py holds no wrnog\. Did you mean wrong\?"),
        ("user_data:np", r"data\.source='user_data:np' is a module, not a function"),
        ("no_such_module:f", r"there is no module no_such_module\. Looked in .*installed packages"),
    ],
)
def test_the_users_own_function_goes_wrong(source, message):
    with pytest.raises(ValueError, match=message):
        open_splits(DataConfig(source=source))


def test_take_of_a_plain_source_stacks_examples():
    plain = [{"inputs": np.full(2, i), "weights": np.float32(1)} for i in range(4)]
    batch = take(plain, np.array([3, 1]))
    assert batch["inputs"].tolist() == [[3, 3], [1, 1]]
    assert batch["weights"].shape == (2,)


def test_a_grain_dataset_is_a_source():
    import grain

    dataset = grain.MapDataset.source(from_arrays({"targets": np.arange(5)}).train)
    assert take(dataset, np.array([4, 0]))["targets"].tolist() == [4, 0]
