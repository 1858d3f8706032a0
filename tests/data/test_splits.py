"""What `open_splits` refuses, and what identifies the data."""

import sys

import numpy as np
import pytest
from spmdkit.configs.config_errors import Problem
from spmdkit.configs.validation import to_dataclass
from spmdkit.configs.yaml_reader import read_yaml
from spmdkit.data import DataConfig, Splits, from_arrays, open_splits
from spmdkit.data.source import take
from spmdkit.mesh.errors import UserError


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


def test_a_vocabulary_covers_the_ids_of_both_splits(tmp_path):
    for name, ids in (("train", 7), ("eval", 9)):
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=np.uint16) % ids)
    files = {"files": (f"{tmp_path}/train.npy",), "eval_files": (f"{tmp_path}/eval.npy",)}
    assert open_splits(DataConfig(source="tokens", length=8, **files)).vocabulary == 9


def test_too_little_to_train_on(corpus):
    with pytest.raises(ValueError) as caught:
        open_splits(config(corpus, length=10**6))
    assert str(caught.value).startswith("data: the training split has ")
    assert "one example needs data.length + 1 = 1,000,001 in one piece. Give it more data or" in str(caught.value)


def test_empty_evaluation_split(corpus):
    with pytest.raises(
        ValueError, match=r"the evaluation split \(data\.eval_fraction=1e-05\) has .* set data\.eval_fraction: 0"
    ):
        open_splits(config(corpus, eval_fraction=1e-5))
    assert open_splits(config(corpus, eval_fraction=0.0)).evaluation is None
    (corpus / "short.eval").write_text("short")
    with pytest.raises(ValueError, match=r"data\.eval_files: no file matches"):
        open_splits(config(corpus, eval_files=(f"{corpus}/nowhere",)))
    with pytest.raises(ValueError, match=r"the evaluation split \(data\.eval_files\) has 6 tokens"):
        open_splits(config(corpus, eval_files=(f"{corpus}/*.eval",)))


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
        "def streamed(config):\n"
        "    return mine(config)._replace(description=' '.join(config.files))\n"
        "def empty(config):\n"
        "    return mine(config)._replace(evaluation=[])\n"
        "def different(config):\n"
        "    return mine(config)._replace(evaluation=[{'ids': 1, 'weights': 1}])\n"
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
def test_the_users_own_function_may_read_urls(tmp_path):
    config = DataConfig(source="user_data:streamed", length=7, files=("s3://bucket/*.npz", "b"))
    assert open_splits(config, [tmp_path]).description == f"s3://bucket/*.npz {tmp_path / 'b'}"


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("user_data:wrong", r"data\.source='user_data:wrong' returned a int; it must return Splits"),
        ("user_data:weightless", r"returned training examples with inputs; \"weights\" is missing: float32"),
        ("user_data:empty", r"returned no examples for evaluation\. Give some, or evaluation=None to train without it"),
        (
            "user_data:different",
            r"training examples with .*, but evaluation examples with ids, weights; the names must",
        ),
        ("user_data:wrnog", r"user_data\.py does not define wrnog\. Did you mean wrong\?"),
        ("user_data:np", r"data\.source='user_data:np' is a module, not a function"),
        ("no_such_module:f", r"unknown module no_such_module\. Searched .*installed packages"),
    ],
)
def test_rejects_invalid_user_functions(source, message):
    with pytest.raises(ValueError, match=message):
        open_splits(DataConfig(source=source))


def test_a_grain_dataset_is_a_source():
    import grain

    dataset = grain.MapDataset.source(from_arrays({"targets": np.arange(5)}).train)
    assert take(dataset, np.array([4, 0]))["targets"].tolist() == [4, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "data.length=0 must be at least 1."),
        ({"layout": {"inputs": [["data"], 3]}}, "data.layout[1]=3 must be a string or a list."),
        ({"mixture": ({"source": "stdlib"},)}, "data.mixture[0]={'source': 'stdlib'} must be a MixturePart."),
    ],
)
def test_rejects_invalid_values_from_python(options, message):
    with pytest.raises(UserError) as caught:
        DataConfig(**options)
    assert str(caught.value) == message


TABLE = {"source": "csv", "files": ("a",), "target": "y"}
TOKENS = {"source": "tokens", "files": ("a",)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "parket", "files": ("a",)}, r"data\.source='parket'.*Did you mean parquet\?"),
        ({"source": "nothing like it"}, r"choose from stdlib, synthetic, synthetic_tokens, text"),
        ({"source": "text"}, r"data\.source=text: data\.files is empty"),
        ({"files": ("a.txt",)}, r"data\.source=stdlib does not read files.*set data\.source: text"),
        ({"image_size": 8}, r"data\.image_size=8: data\.source=stdlib does not contain images"),
        ({**TOKENS, "tokenizer": "x"}, "data.tokenizer='x': data.source=tokens does not contain texts"),
        ({"source": "synthetic_tokens", "tokenizer": "x"}, r"data\.tokenizer"),
        ({"source": "synthetic_tokens", "packed": True}, r"data\.packed"),
        ({"source": "synthetic_tokens", "files": ("a",)}, r"data\.files"),
        ({"source": "csv", "files": ("a",)}, r"data\.target is missing; set it to the column to predict"),
        ({"source": "text", "files": ("a",), "target": "y"}, r"data\.target='y': data\.source=text is not a table"),
        ({"source": "parquet", "files": ("a",), "columns": ("x",)}, r"data\.columns=\['x'\]: data\.target is missing"),
        ({**TABLE, "tokenizer": "t"}, "does not contain texts"),
        ({**TABLE, "packed": True}, "does not contain documents"),
        ({"separator": 3}, r"data\.source=stdlib ends each text with byte 0; leave data\.separator out"),
        ({**TOKENS, "packed": True}, r"set data\.separator to the token id that ends"),
        ({**TOKENS, "separator": 9, "vocabulary": 9}, r"data\.separator=9: data\.vocabulary=9 allows only 0 \.\. 8"),
    ],
)
def test_rejects_contradictions(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("length: 0", "data.length must be at least 1"),
        ("dtype: int16", "data.dtype must be one of uint8, uint16, uint32 (Did you mean uint16?)"),
        ("vocabulary: -1", "data.vocabulary must be at least 0"),
        ("eval_fraction: 1.0", "data.eval_fraction must be less than 1"),
        ("threads: -1", "data.threads must be at least 0"),
        ("bad_records: -1", "data.bad_records must be at least 0"),
        ("separator: -2", "data.separator must be at least -1"),
        ("files: a.txt", "data.files must be a list, got 'a.txt' (string)"),
        ("mixture: [3]", "data.mixture[0] must be a mapping (key: value), got 3"),
        ("mixture: [{source: stdlib}]", "data.mixture[0].weight is required"),
        ("mixture: [{source: stdlib, weight: 0}]", "data.mixture[0].weight must be greater than 0, got 0"),
        ("mixture: [{source: stdlib, weight: 1, file: []}]", "data.mixture[0].file is not a valid key. Did you mean "),
    ],
)
def test_rejects_values_out_of_range(values, message):
    problems: list[Problem] = []
    to_dataclass(DataConfig, read_yaml(f"{{{values}}}").value, "data", problems)
    assert message in problems[0].message


def test_collects_all_problems():
    with pytest.raises(ValueError) as caught:
        DataConfig(source="txt", tokenizer="x", image_size=3, packed=True, separator=3, vocabulary=2)
    assert [line.partition("=")[0] for line in str(caught.value).splitlines()] == [
        "data.source",
        "data.image_size",
        "data.separator",
    ]
