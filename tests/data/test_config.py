"""The `data:` section refuses what cannot work, all at once, naming keys."""

import dataclasses

import pytest
from spmdkit.data import DataConfig


def test_the_defaults_are_valid():
    assert DataConfig().source == "stdlib"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "parket", "files": ("a",)}, r"data\.source='parket'.*Did you mean parquet\?"),
        ({"source": "nothing like it"}, r"the sources are stdlib, synthetic, synthetic_tokens, text"),
        ({"source": "text"}, r"data\.source=text: it reads files, and data\.files is empty"),
        ({"files": ("a.txt",)}, r"data\.source=stdlib: it reads no files.*set data\.source: text"),
        ({"source": "text", "files": "a.txt"}, r"data\.files='a\.txt': it is a list"),
        ({"length": 0}, r"data\.length=0"),
        ({"dtype": "int16"}, r"data\.dtype='int16': token ids are uint8, uint16, uint32"),
        ({"vocabulary": -1}, r"data\.vocabulary=-1"),
        ({"vocabulary": 2**31}, r"data\.vocabulary=2147483648"),
        ({"eval_fraction": 1.0}, r"data\.eval_fraction=1\.0"),
        ({"prefetch": -1}, r"data\.prefetch=-1"),
        ({"threads": -1}, r"data\.threads=-1"),
    ],
)
def test_says_what_is_wrong(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)


def test_collects_all_problems():
    with pytest.raises(ValueError) as caught:
        DataConfig(source="txt", length=0, eval_fraction=-0.1)
    assert [line.partition("=")[0] for line in str(caught.value).splitlines()] == [
        "data.source",
        "data.length",
        "data.eval_fraction",
    ]


def test_every_key_an_error_names_exists():
    fields = {field.name for field in dataclasses.fields(DataConfig)}
    with pytest.raises(ValueError) as caught:
        DataConfig(source="text", length=0, dtype="x", vocabulary=-1, eval_fraction=2, prefetch=-1, threads=-1)
    named = {word.split(".")[1].split("=")[0].strip(":;,") for word in str(caught.value).split() if "data." in word}
    assert named <= fields
