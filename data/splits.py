"""Training and evaluation examples from a `data:` section."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..mesh.errors import UserError
from ..mesh.files import below_root
from ..mesh.known_causes import lost_worker
from ..parallel.model.user_code import import_function
from ..parallel.model.user_errors import as_user_error
from .config import DataConfig
from .ordering.mixture import open_mixture
from .source import Splits, fingerprint, splits_of
from .sources import texts
from .sources.arrays import read_arrays
from .sources.columns import read_jsonl, read_parquet
from .sources.images import read_images
from .sources.records import read_record_arrays, read_records
from .sources.saved_datasets import read_saved, read_saved_arrays
from .sources.synthetic import synthetic_digits, synthetic_tokens
from .sources.tables import read_table
from .sources.tokenizer import TokenizerCodec, tokenized
from .windows import WindowSource

READERS = {
    "stdlib": lambda files, config, key: texts.read_stdlib(),
    "text": lambda files, config, key: texts.read_text(files, key),
    "tokens": texts.read_tokens,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "huggingface": read_saved,
    "arrayrecord": read_records,
}
"""Sources of documents, which are cut into windows."""

EXAMPLE_READERS = {
    "synthetic": lambda config: synthetic_digits(config.eval_fraction),
    "arrays": read_arrays,
    "images": read_images,
    "huggingface": read_saved_arrays,
    "arrayrecord": read_record_arrays,
}
"""Sources of whole examples; those that are also in `READERS` if `data.records` is "arrays"."""


def open_splits(config: DataConfig, search_path: Sequence[str | Path] = (), batch: int = 1) -> Splits:
    """Opens the data of a config.

    Args:
        config: The `data:` section.
        search_path: Directories to search for the user's own module before the installed packages. Relative files start
            from the first of them, or from the working directory if there are none.
        batch: Rows of a training batch, for `synthetic_tokens`.

    Returns:
        Training and evaluation examples; every process that calls this with the same files gets the same ones.

    Raises:
        UserError: Files, columns or a package are missing, files are unreadable, a split has no examples, or ids are
            invalid.
    """
    if search_path:
        config = _below(config, Path(search_path[0]))
    if ":" in config.source:
        return _user_splits(config, search_path)
    if config.source == "mixture":
        return open_mixture(config, lambda part: open_splits(part, search_path))
    if config.target:
        return read_table(config)
    if config.source == "synthetic_tokens":
        return synthetic_tokens(config, batch)
    if config.source in EXAMPLE_READERS and (config.source not in READERS or config.records == "arrays"):
        return EXAMPLE_READERS[config.source](config)
    return _language_splits(config)


def is_text(config: DataConfig, vocabulary: int | None) -> bool:
    """True if token ids are text: those of `data.tokenizer`, or bytes.

    Args:
        config: The `data:` section.
        vocabulary: The number of token ids; None if examples are not tokens.
    """
    return vocabulary is not None and (bool(config.tokenizer) or vocabulary == texts.BYTES)


def open_codec(config: DataConfig, search_path: Sequence[str | Path] = ()) -> texts.ByteCodec | TokenizerCodec:
    """Opens the codec between text and the token ids of data that is text.

    Args:
        config: The `data:` section.
        search_path: See `open_splits`.

    Raises:
        UserError: The file of the tokenizer is missing or invalid, or the package is not installed.
    """
    if not config.tokenizer:
        return texts.ByteCodec()
    return TokenizerCodec(_below(config, Path(search_path[0])) if search_path else config)


def _below(config: DataConfig, root: Path) -> DataConfig:
    """Returns the config with absolute paths; relative ones start from `root`."""
    directory = root.absolute()
    changed: dict[str, Any] = {
        key: tuple(below_root(pattern, directory) for pattern in getattr(config, key))
        for key in ("files", "eval_files")
    }
    if config.tokenizer:
        changed["tokenizer"] = below_root(config.tokenizer, directory)
    return replace(config, **changed)


def _user_splits(config: DataConfig, search_path: Sequence[str | Path]) -> Splits:
    """Returns the splits of the user's own function."""
    make_splits = import_function(config.source, "data.source", search_path)
    with as_user_error(f"data.source={config.source!r}", make_splits, passes=lambda error: bool(lost_worker(error))):
        splits = make_splits(config)
        _check_splits(splits, config)
    return splits


def _check_splits(splits: Any, config: DataConfig) -> None:
    """Checks the result of the user's function, with the first example of each split."""
    given = f"data.source={config.source!r} returned"
    if not isinstance(splits, Splits):
        raise UserError(f"{given} a {type(splits).__name__}; it must return Splits, as spmdkit.data.from_arrays does.")
    for name, split in splits.by_name().items():
        if not len(split):
            raise UserError(f"{given} no examples for {name}. Give some, or evaluation=None to train without it.")
        if "weights" not in split[0]:
            raise UserError(
                f'{given} {name} examples with {", ".join(split[0])}; "weights" is missing: float32, one number per '
                "row (1, or 0 for padding) or, for tokens, per target."
            )
    if splits.evaluation is not None and splits.evaluation[0].keys() != splits.train[0].keys():
        raise UserError(
            f"{given} training examples with {', '.join(splits.train[0])}, but evaluation examples with "
            f"{', '.join(splits.evaluation[0])}; the names must be the same."
        )


def _language_splits(config: DataConfig) -> Splits:
    """Returns windows over streams of token ids (for text: bytes)."""
    corpus = _read_corpus(config.files, config, "data.files")
    if config.eval_files:
        train_documents = corpus.documents
        eval_documents = _read_corpus(config.eval_files, config, "data.eval_files").documents
    else:
        train_documents, eval_documents = texts.split_documents(corpus.documents, config.eval_fraction)
    train, evaluation = texts.join(train_documents, corpus.separator), texts.join(eval_documents, corpus.separator)
    vocabulary = _vocabulary(corpus, train + evaluation, config)
    if config.packed and corpus.separator is None:
        raise UserError(f"data.packed=True: the {corpus.description} lack an end of documents; set data.separator.")
    checked = vocabulary if corpus.vocabulary is None and config.vocabulary else None
    ends = corpus.separator if config.packed else None
    sources = [WindowSource(streams, config.length, checked, ends) for streams in (train, evaluation)]
    has_evaluation = bool(config.eval_files) or config.eval_fraction > 0
    _check_not_empty(sources[0], train, "training split", config.length)
    if has_evaluation:
        held_out = "data.eval_files" if config.eval_files else f"data.eval_fraction={config.eval_fraction}"
        _check_not_empty(sources[1], evaluation, f"evaluation split ({held_out})", config.length)
    described = (
        f"{config.source}: {corpus.description}; {len(sources[0]):,} training and {len(sources[1]):,} evaluation "
        f"examples of {config.length:,} tokens, vocabulary {vocabulary:,}"
    )
    names, ids = [each.name for each in train + evaluation], [each.ids for each in train + evaluation]
    content = fingerprint(ids, config.length, len(train), vocabulary, names, ends)
    return splits_of(sources[: 2 if has_evaluation else 1], vocabulary, described, content)


def _read_corpus(files: tuple[str, ...], config: DataConfig, key: str) -> texts.Corpus:
    """Reads the documents of a source, as token ids if the config names a tokenizer."""
    corpus = READERS[config.source](files, config, key)
    return tokenized(corpus, config) if config.tokenizer else corpus


def _vocabulary(corpus: texts.Corpus, streams: list[texts.Document], config: DataConfig) -> int:
    """Returns the number of token ids: the config's, the reader's, or the largest id + 1."""
    if corpus.vocabulary is not None and 0 < config.vocabulary < corpus.vocabulary:
        least = f"{corpus.vocabulary}, the number of ids of the text"
        raise UserError(f"data.vocabulary={config.vocabulary} must be at least {least}. Leave it out.")
    if vocabulary := config.vocabulary or corpus.vocabulary:
        return vocabulary
    extremes = [(int(stream.ids.min()), int(stream.ids.max()), stream.name) for stream in streams]
    for lowest, highest, name in extremes:
        if lowest < 0 or highest >= 2**31 - 1:
            raise UserError(
                f"{name} contains values from {lowest} to {highest}; token ids must be at least 0 and below 2**31 - 1. "
                "Check that the file contains token ids and, for a raw file, data.dtype."
            )
    return max((highest for _, highest, _ in extremes), default=0) + 1


def _check_not_empty(source: WindowSource, documents: list[texts.Document], name: str, length: int) -> None:
    """Raises a UserError if a split lacks a whole example."""
    if not len(source):
        without = "" if name == "training split" else " To train without evaluation, set data.eval_fraction: 0."
        raise UserError(
            f"data: the {name} has {sum(len(each.ids) for each in documents):,} tokens; one example needs data.length "
            f"+ 1 = {length + 1:,} in one piece. Give it more data or lower data.length.{without}"
        )
