"""Texts as the ids of a tokenizer that the library itself has trained, against what the library says of each text."""

import json

import numpy as np
import pytest
from spmdkit.data import DataConfig, open_splits
from spmdkit.data.splits import is_text, open_codec
from spmdkit.mesh.errors import UserError

TEXTS = [f"mesh {number} axis layout step of the mesh axis number {number}" for number in range(40)]


def trained(folder, *special):
    """It also begins each text with its first special token, unless it is asked not to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    for each in special[:1]:
        begins = {"single": f"{each} $A", "special_tokens": [(each, tokenizer.token_to_id(each))]}
        tokenizer.post_processor = processors.TemplateProcessing(**begins)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def rows(folder):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def ids_of(splits, length):
    inputs = [np.concatenate([example["inputs"], example["targets"][-1:]]) for example in splits.train]
    return np.concatenate([inputs[0], *[each[1:] for each in inputs[1:]]])[: len(splits.train) * length + 1]


def test_the_codec_gives_text_back_as_it_was_encoded_in_training(tmp_path):
    tokenizer = trained(tmp_path, "<|endoftext|>")
    config = DataConfig(source="jsonl", files=(str(rows(tmp_path)),), tokenizer="tokenizer.json", length=7)
    assert is_text(config, 300)
    assert not is_text(config, None)
    codec = open_codec(config, [tmp_path])
    for text in ("mesh axis", "def Ü", b"mesh axis"):
        tokens = codec.encode(text)
        plain = text if isinstance(text, str) else text.decode()
        assert tokens == tokenizer.encode(plain, add_special_tokens=False).ids
        assert codec.decode(tokens) == (text if isinstance(text, str) else text.decode())
    assert len(codec.encode("mesh axis")) < len("mesh axis")
    assert codec.decode(codec.encode("")) == "<|endoftext|>"


def test_without_a_tokenizer_tokens_of_256_ids_are_bytes():
    config = DataConfig(source="text", files=("a.txt",))
    assert (is_text(config, 256), is_text(config, 300)) == (True, False)
    codec = open_codec(config)
    assert (codec.encode("Ü"), codec.encode(b"ab")) == ([195, 156], [97, 98])
    assert codec.decode([97, 255]) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("named", ["tokenizer.json", "."])
def test_ids_are_those_of_the_library_each_text_with_its_end(named, tmp_path):
    tokenizer = trained(tmp_path, "<|endoftext|>")
    end = tokenizer.token_to_id("<|endoftext|>")
    config = DataConfig(source="jsonl", files=(str(rows(tmp_path)),), tokenizer=named, length=7, eval_fraction=0)
    splits = open_splits(config, [tmp_path])
    expected = np.concatenate([[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in TEXTS])
    found = ids_of(splits, 7)
    np.testing.assert_array_equal(found, expected[: len(found)])
    assert splits.vocabulary == tokenizer.get_vocab_size()
    assert "tokens of tokenizer.json" in splits.description


@pytest.mark.parametrize("setting", ["enable_truncation", "enable_padding"])
def test_truncation_and_padding_of_the_file_are_not_used(tmp_path, setting):
    """Both are for the batches of the program that saved the file: documents would lose text, or gain padding."""
    tokenizer = trained(tmp_path, "<|endoftext|>")
    config = DataConfig(source="jsonl", files=(str(rows(tmp_path)),), tokenizer="tokenizer.json", length=7)
    expected = ids_of(open_splits(config, [tmp_path]), 7)
    if setting == "enable_truncation":
        tokenizer.enable_truncation(max_length=3)
    else:
        tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    np.testing.assert_array_equal(ids_of(open_splits(config, [tmp_path]), 7), expected)
    assert open_codec(config, [tmp_path]).decode(open_codec(config, [tmp_path]).encode(TEXTS[0])) == TEXTS[0]


def test_the_separator_of_the_config_wins(tmp_path):
    tokenizer = trained(tmp_path, "<|endoftext|>")
    given = {"source": "jsonl", "files": (str(rows(tmp_path)),), "tokenizer": str(tmp_path), "length": 7}
    splits = open_splits(DataConfig(**given, separator=9, eval_fraction=0))
    first = len(tokenizer.encode(TEXTS[0], add_special_tokens=False).ids)
    assert ids_of(splits, 7)[first] == 9


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokenizer": "nowhere"}, r"data\.tokenizer=.*nowhere does not exist"),
        ({"tokenizer": "rows.jsonl"}, r"rows\.jsonl cannot be read as a tokenizer"),
        ({"separator": 300}, r"data\.separator=300 is not an id of .*tokenizer\.json, which are 0 \.\. 299"),
        ({"separator": 5000}, r"data\.separator=5000 is not an id of .*tokenizer\.json, which are 0 \.\. 299"),
        ({}, r"lacks a token that ends a document\. Set data\.separator"),
        ({"column": "ids", "separator": 3}, "the token id rows .* are token ids"),
    ],
)
def test_rejects_invalid_options(options, told, tmp_path):
    trained(tmp_path)
    file = rows(tmp_path)
    file.write_text("".join(json.dumps({"text": text, "ids": [1, 2, 3]}) + "\n" for text in TEXTS))
    config = DataConfig(**{"source": "jsonl", "files": (str(file),), "tokenizer": ".", "length": 7} | options)
    with pytest.raises(UserError, match=told):
        open_splits(config, [tmp_path])


def test_texts_have_to_be_utf_8(tmp_path):
    trained(tmp_path, "</s>")
    (tmp_path / "a.txt").write_bytes(b"mesh \xff axis" * 20)
    config = DataConfig(source="text", files=("a.txt",), tokenizer=".", length=8)
    with pytest.raises(UserError, match=r"a\.txt is not valid UTF-8 \(byte 5\), which data\.tokenizer requires"):
        open_splits(config, [tmp_path])
