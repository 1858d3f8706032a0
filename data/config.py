"""The `data:` section of a config: the source, how it is cut into examples, and their order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..mesh.errors import UserError, did_you_mean
from .shares import whole_weights

EMBEDDED_SOURCES = ("stdlib", "synthetic", "synthetic_tokens")
FILE_SOURCES = ("text", "tokens", "jsonl", "csv", "parquet", "images", "arrayrecord", "huggingface", "arrays")
TABLES = ("csv", "parquet")
WITHOUT_DOCUMENTS = ("synthetic", "synthetic_tokens", "arrays", "csv", "images")
WITHOUT_TEXTS = (*WITHOUT_DOCUMENTS, "tokens")
RECORDS = ("documents", "arrays")
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
MAX_AHEAD = 1024
"""Batches read ahead, and threads that read them."""
STRINGS, NUMBER = "a list of strings", "a number"
PART_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "weight": ((int, float), NUMBER),
    "source": (str, "a string"),
    "files": ((list, tuple), STRINGS),
    "eval_files": ((list, tuple), STRINGS),
    "column": (str, "a string"),
    "target": (str, "a string"),
    "columns": ((list, tuple), STRINGS),
    "dtype": (str, "a string"),
    "separator": (int, "an integer"),
    "records": (str, "a string"),
    "eval_fraction": ((int, float), NUMBER),
}
"""The keys that each part of a mixture can set, with their types; all parts share the others."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of examples, how it is cut and split, and the order of examples.

    Raises:
        UserError: A value is out of range, or values contradict each other; all problems at once.
    """

    source: str = "stdlib"
    """The source of examples: stdlib (the Python sources on this machine, as bytes), text (files as bytes), tokens
    (.npy or raw arrays of token ids), jsonl or parquet (one column of texts or token ids), huggingface (the same for a
    dataset saved on disk), arrayrecord (see `records`), arrays (.npz with inputs and targets), csv (a table of numbers,
    see `target`; parquet too), images (a directory with one subdirectory for each class), synthetic (noisy images
    of digits, 64 features), synthetic_tokens (random tokens), mixture (several of these, see `mixture`), or your own
    "module:function" (DataConfig -> Splits)."""

    mixture: tuple[Mapping[str, Any], ...] = ()
    """The parts of source: mixture, such as {source: text, files: ["a/*.txt"], weight: 7}: each part has the share
    weight / sum of weights of all samples, to within one. A part can also set files, eval_files, column, target,
    columns, records, dtype, separator and eval_fraction; all parts share the other keys."""

    files: tuple[str, ...] = ()
    """Files or globs ("corpus/**/*.txt") of the sources that read files; huggingface, images: directories."""

    eval_files: tuple[str, ...] = ()
    """Files or globs of the evaluation split. Empty: eval_fraction of `files` is held out instead."""

    column: str = "text"
    """Column (jsonl: key) with the texts, or with lists of token ids."""

    target: str = ""
    """Column of a csv or parquet table that the model predicts: numbers, or texts as classes. Each row is then an
    example, with the other columns as its inputs. csv requires it; parquet without it is a column of texts or ids."""

    columns: tuple[str, ...] = ()
    """Columns of numbers that are the inputs of a table, in this order. Empty: every column but `target`."""

    image_size: int = 0
    """Height and width in pixels that images are scaled to. 0: images already have one size."""

    records: str = "documents"
    """The content of a record of arrayrecord, or of a row of huggingface: documents, a text or token ids (arrayrecord:
    ids of data.dtype if set, else the bytes of a text); arrays, an example (arrayrecord: as np.savez writes it, read
    when a batch needs it; huggingface: every column of numbers)."""

    length: int = 256
    """Tokens (text: bytes) per example."""

    dtype: str = ""
    """Type of token ids: uint8, uint16 or uint32. Raw token files require it; .npy files must match it."""

    vocabulary: int = 0
    """Number of token ids. 0: 256 for text and synthetic_tokens, the largest id + 1 for tokens (found by reading every
    token once)."""

    packed: bool = False
    """Keep documents that share an example apart: attention stays within a document, positions count from its start,
    and no token is predicted from another document. Documents end with byte 0 (texts) or `separator`."""

    tokenizer: str = ""
    """tokenizer.json of Hugging Face, or its directory: texts become its ids. Empty: they are bytes."""

    separator: int = -1
    """Token id that ends a document in the source tokens, and that is put after each row of token ids in jsonl and
    parquet; -1 = none. With `tokenizer`, the id that ends a text; -1 = the tokenizer's own. Bytes end with 0."""

    bad_records: int = 0
    """Maximum number of records to leave out because they cannot be read, in jsonl, parquet, huggingface, images and
    arrayrecord; each is logged with its file and place. 0: the first one ends the run. Each process counts the records
    that it reads while training."""

    eval_fraction: float = 0.05
    """Share of the data held out for evaluation, from 0 (no evaluation split) to below 1."""

    shuffle: bool = True
    """Visit the training examples in a new random order in each epoch."""

    prefetch: int = 2
    """Batches that a background thread reads and places on the mesh ahead of the step. 0: read on demand."""

    threads: int = 0
    """Further threads that read examples, for slow storage."""

    layout: Mapping[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    """Layout of the arrays of a batch before the step takes them, by the first regular expression that matches the
    whole name: one entry per dim, a mesh axis, null or a list of axes; {".*": [[data, fsdp, context, tensor]]} reads
    every row in one process and sends it to one device. Empty: the step's layout at once."""

    def __post_init__(self) -> None:
        if problems := [*_problems(self)]:
            raise UserError("\n".join(problems))


def part_config(config: DataConfig, number: int) -> DataConfig:
    """Returns the config of one part of a mixture.

    Args:
        config: The config of the mixture.
        number: The part, in [0, len(config.mixture)).

    Raises:
        UserError: A value of the part is out of range, or values contradict each other.
    """
    part = {key: value for key, value in config.mixture[number].items() if key != "weight"}
    lists = {key: tuple(value) for key, value in part.items() if isinstance(value, list)}
    return replace(config, **({"files": (), "eval_files": (), "mixture": ()} | part | lists))


def _problems(config: DataConfig) -> Iterator[str]:
    """Yields everything wrong with the values, each message with its config key."""
    own = [*_own_problems(config)]
    yield from own
    for number in range(len(config.mixture)):
        found = [problem for problem in _part_problems(config, number) if problem not in own]
        yield from (f"data.mixture[{number}]: {problem}" for problem in found)
        own += found
    if config.mixture and not own:
        parts = [part_config(config, number) for number in range(len(config.mixture))]
        for number, part in enumerate(parts):
            if (first := parts.index(part)) < number:
                yield (
                    f"data.mixture[{number}] reads the same data as data.mixture[{first}]; merge them and add their "
                    "weights."
                )
        try:
            whole_weights([part["weight"] for part in config.mixture], "data.mixture")
        except UserError as error:
            yield str(error)


def _own_problems(config: DataConfig) -> Iterator[str]:
    """Yields everything wrong with the values outside the parts of a mixture."""
    yield from _source_problems(config)
    yield from _mixture_problems(config)
    if config.length < 1:
        yield f"data.length={config.length} must be at least 1 token."
    if config.records not in RECORDS:
        hint = did_you_mean(config.records, RECORDS)
        yield f"data.records={config.records!r} must be {' or '.join(RECORDS)}.{hint}"
    if config.dtype not in ("", *TOKEN_DTYPES):
        yield f"data.dtype={config.dtype!r} must be one of {', '.join(TOKEN_DTYPES)}."
    if not 0 <= config.vocabulary <= 2**31 - 1:
        yield f"data.vocabulary={config.vocabulary} must be from 1 to 2**31 - 1 (ids are int32), or 0 for automatic."
    yield from _table_problems(config)
    if config.tokenizer and config.source in WITHOUT_TEXTS:
        yield f"data.tokenizer={config.tokenizer!r}: data.source={config.source} does not contain texts; leave it out."
    yield from _packing_problems(config)
    if not 0 <= config.eval_fraction < 1:
        yield f"data.eval_fraction={config.eval_fraction} must be a share of the data, from 0 to below 1."
    for name in ("bad_records", "prefetch", "threads", "image_size"):
        if getattr(config, name) < 0:
            yield f"data.{name}={getattr(config, name)} must be 0 or more."
    for name in ("prefetch", "threads"):
        if getattr(config, name) > MAX_AHEAD:
            yield f"data.{name}={getattr(config, name)} must be at most {MAX_AHEAD}."


def _mixture_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the parts of a mixture as a whole."""
    if config.source == "mixture" and not config.mixture:
        yield "data.source=mixture: data.mixture is empty; list its parts, with weights."
    elif config.source != "mixture" and config.mixture:
        yield f"data.mixture is set, but data.source={config.source} does not have parts; set data.source: mixture."
    if config.source == "mixture" and (config.files or config.eval_files):
        yield "data.source=mixture: each part has its own files; put data.files and data.eval_files into the parts."


def _part_problems(config: DataConfig, number: int) -> Iterator[str]:
    """Yields everything wrong with one part of a mixture."""
    part = config.mixture[number]
    if not isinstance(part, Mapping):
        yield f"a part must be a mapping such as {{source: text, files: [...], weight: 1}}, got {part!r}."
        return
    found = [
        f"unknown key {key!r}; the keys of a part are {', '.join(PART_TYPES)}.{did_you_mean(str(key), PART_TYPES)}"
        for key in part
        if key not in PART_TYPES
    ]
    found += [f"{key} is missing." for key in ("weight", "source") if key not in part]
    found += [
        f"{key}={value!r} must be {PART_TYPES[key][1]}."
        for key, value in part.items()
        if key in PART_TYPES and not _has_type(value, PART_TYPES[key][0])
    ]
    if not found and part["source"] == "mixture":
        found.append("source=mixture: a part cannot be a mixture; list its parts here, with their shares of the whole.")
    yield from found
    if found:
        return
    try:
        part_config(config, number)
    except UserError as error:
        yield from str(error).splitlines()


def _has_type(value: Any, types: type | tuple[type, ...]) -> bool:
    items = value if isinstance(value, list | tuple) else ()
    return isinstance(value, types) and not isinstance(value, bool) and all(isinstance(item, str) for item in items)


def _table_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the keys of tables and images."""
    if config.source == "csv" and not config.target:
        yield "data.source=csv: data.target is missing; set it to the column to predict."
    if config.target and config.source not in TABLES:
        yield f"data.target={config.target!r}: data.source={config.source} is not a table; leave data.target out."
    if isinstance(config.columns, str):
        yield f"data.columns={config.columns!r} must be a list of columns; put it into brackets."
    elif config.columns and not config.target:
        yield f"data.columns={list(config.columns)}: data.target is missing; set it to the column to predict."
    if config.image_size and config.source != "images":
        yield f"data.image_size={config.image_size}: data.source={config.source} does not contain images; leave it out."


def _packing_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the end of documents."""
    given = f"data.separator={config.separator}"
    if not -1 <= config.separator < 2**31 - 1:
        yield f"{given} must be a token id, from 0 to 2**31 - 2, or -1 for none."
    if config.vocabulary and config.separator >= config.vocabulary:
        yield f"{given}: data.vocabulary={config.vocabulary} allows only 0 .. {config.vocabulary - 1}."
    if config.separator >= 0 and config.source in ("stdlib", "text") and not config.tokenizer:
        yield f"{given}: data.source={config.source} ends each text with byte 0; leave data.separator out."
    if config.packed and (config.source in WITHOUT_DOCUMENTS or config.records == "arrays"):
        yield f"data.packed=True: data.source={config.source} does not contain documents; leave data.packed out."
    if config.packed and config.source == "tokens" and config.separator < 0:
        yield "data.packed=True: set data.separator to the token id that ends a document in data.source=tokens."


def _source_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the source and its files."""
    for key in ("files", "eval_files"):
        if isinstance(getattr(config, key), str):
            yield f"data.{key}={getattr(config, key)!r} must be a list of files or globs; put it into brackets."
    if ":" in config.source:  # the user's own function may use `files` or not
        return
    known = (*EMBEDDED_SOURCES, *FILE_SOURCES, "mixture")
    if config.source not in known:
        hint = did_you_mean(config.source, known)
        choices = f"choose from {', '.join(known)}, or module:function.{hint}"
        yield f"data.source={config.source!r} is not a known source: {choices}"
    elif config.source in FILE_SOURCES and not config.files:
        yield f"data.source={config.source}: data.files is empty; give files or globs."
    elif config.source in EMBEDDED_SOURCES and (config.files or config.eval_files):
        yield (
            f"data.source={config.source} does not read files, but data.files or data.eval_files is set; remove them, "
            "or set data.source: text."
        )
