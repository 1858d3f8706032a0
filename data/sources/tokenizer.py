"""Texts as the ids of a tokenizer: `tokenizer.json`, as Hugging Face's `tokenizers` writes it.

Texts are read as bytes first, and become ids here, document by document, before they are split and joined: so every
source of texts can be tokenized. The id that ends a document is the tokenizer's own, or `data.separator`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError, hub_hint
from ..config import DataConfig
from .source_files import explain_missing
from .texts import BYTES, Corpus, Document

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, in existing models' tokenizers; the first that a tokenizer has is used."""
BATCH = 256
"""Documents that are encoded in one call."""


def tokenized(corpus: Corpus, config: DataConfig) -> Corpus:
    """Returns a corpus of texts as one of token ids.

    Args:
        corpus: Documents of bytes, UTF-8.
        config: `tokenizer`, the file or a directory with tokenizer.json; `separator`.

    Returns:
        The same documents as uint32 ids, in memory; the vocabulary is the tokenizer's.

    Raises:
        UserError: The documents are already token ids, the file is missing or invalid, a document is not UTF-8, no id
            ends a document, or the package tokenizers is not installed.
    """
    if corpus.vocabulary != BYTES:
        raise UserError(f"data.tokenizer={config.tokenizer!r}: the {corpus.description} are token ids. Leave it out.")
    file = tokenizer_file(config.tokenizer)
    tokenizer = _load(file)
    end = _end(tokenizer, config, file)
    documents = list(_encode(corpus, tokenizer))
    count = sum(len(document.ids) for document in documents)
    described = f"{corpus.description}, {count:,} tokens of {file.name}"
    return Corpus(documents, end, tokenizer.get_vocab_size(), described)


class TokenizerCodec:
    """Text as the ids of a tokenizer, and back; an empty text is the id that ends a document.

    Args:
        config: The `data:` section.

    Raises:
        UserError: See `tokenized`.
    """

    def __init__(self, config: DataConfig) -> None:
        file = tokenizer_file(config.tokenizer)
        self._tokenizer = _load(file)
        self._end = _end(self._tokenizer, config, file)

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the ids of a text, as in training."""
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False).ids or [self._end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids, with those that end documents."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def tokenizer_file(given: str) -> Path:
    """Returns the file of a tokenizer, or tokenizer.json in a directory.

    Raises:
        UserError: The file does not exist.
    """
    path = Path(given)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"data.tokenizer={given!r}: {file} does not exist. Give a tokenizer.json, or its directory.{hub_hint(path)}"
        )
    return file


def _load(file: Path) -> Any:
    """Returns the tokenizer of a file, without its truncation and padding: both are for batches of an encoder."""
    with explain_missing("data.tokenizer", "the package tokenizers", "tokenizers"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"data.tokenizer: {file} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end(tokenizer: Any, config: DataConfig, file: Path) -> int:
    """Returns the id that ends a document."""
    size = tokenizer.get_vocab_size()
    if config.separator >= size:
        raise UserError(f"data.separator={config.separator} is not an id of {file}, which are 0 .. {size - 1}.")
    if config.separator >= 0:
        return config.separator
    found = next((end for end in map(tokenizer.token_to_id, ENDS) if end is not None), None)
    if found is None:
        raise UserError(f"data.tokenizer: {file} lacks a token that ends a document. Set data.separator to an id.")
    return found


def _encode(corpus: Corpus, tokenizer: Any) -> Iterator[Document]:
    for start in range(0, len(corpus.documents), BATCH):
        documents = corpus.documents[start : start + BATCH]
        encodings = tokenizer.encode_batch([_text(document) for document in documents], add_special_tokens=False)
        for document, encoding in zip(documents, encodings, strict=True):
            yield document._replace(ids=np.array(encoding.ids, np.uint32), mapped=False)


def _text(document: Document) -> str:
    try:
        return document.ids.tobytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{document.name} is not valid UTF-8 (byte {error.start:,}), which data.tokenizer requires. Convert the "
            "file, or leave data.tokenizer out to train on bytes."
        ) from error
