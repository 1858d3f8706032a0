"""The `data:` section of a config: what to read, how to cut it into examples, how to order them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean
from .ordering.shares import whole_weights

EMBEDDED_SOURCES = ("stdlib", "synthetic", "synthetic_tokens")
FILE_SOURCES = ("text", "tokens", "jsonl", "csv", "parquet", "images", "arrayrecord", "huggingface", "arrays")
TABLES = ("csv", "parquet")
WITHOUT_DOCUMENTS = ("synthetic", "synthetic_tokens", "arrays", "csv", "images")
WITHOUT_TEXTS = (*WITHOUT_DOCUMENTS, "tokens")
RECORDS = ("documents", "arrays")
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
PART_TYPES: dict[str, tuple[type, ...]] = {
    "weight": (int, float),
    "source": (str,),
    "files": (list, tuple),
    "eval_files": (list, tuple),
    "column": (str,),
    "target": (str,),
    "columns": (list, tuple),
    "dtype": (str,),
    "separator": (int,),
    "records": (str,),
    "eval_fraction": (int, float),
}
"""What a part of a mixture may say for itself; the rest is that of all parts."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, how it is cut into examples and split, and in which order it is served.

    Raises:
        UserError: a value is out of its range, or values contradict each other; all problems at once.
    """

    source: str = "stdlib"
    """Where examples come from: stdlib (the Python sources on this machine, as bytes), text (files as bytes), tokens
    (.npy or raw arrays of token ids), jsonl or parquet (one column of texts or token ids), huggingface (the same of a
    dataset saved on disk), arrayrecord (see `records`), arrays (.npz with inputs and targets), csv (a table of numbers,
    see `target`; parquet too), images (a directory with one subdirectory for each class), synthetic (noisy images
    of digits, 64 features), synthetic_tokens (random tokens), mixture (several of these, see `mixture`), or your own
    "module:function" (DataConfig -> Splits)."""

    mixture: tuple[Mapping[str, Any], ...] = ()
    """The parts of source: mixture, such as {source: text, files: ["a/*.txt"], weight: 7}: of all samples each part has
    its share, weight / sum of weights, to within one. Beside weight and source a part may say files, eval_files,
    column, target, columns, records, dtype, separator and eval_fraction; the other keys are those of all parts."""

    files: tuple[str, ...] = ()
    """Files or globs ("corpus/**/*.txt") of the sources that read files; huggingface, images: folders."""

    eval_files: tuple[str, ...] = ()
    """Files or globs of the evaluation split. None: eval_fraction of `files` is held out instead."""

    column: str = "text"
    """Column (jsonl: key) with the texts, or with lists of token ids."""

    target: str = ""
    """Column of a csv or parquet table with what the model predicts: numbers, or texts as classes. Each row is then an
    example, with the other columns as its inputs. csv needs it; parquet without it is a column of texts or ids."""

    columns: tuple[str, ...] = ()
    """Columns of numbers that are the inputs of a table, in this order. Empty: every column but `target`."""

    image_size: int = 0
    """Height and width in pixels that images are scaled to. 0: images have one size already."""

    records: str = "documents"
    """What a record of arrayrecord, or a row of huggingface, is: documents, a text or token ids (arrayrecord: ids of
    data.dtype where that is given, else the bytes of a text); arrays, an example (arrayrecord: as np.savez writes it,
    read where it is needed; huggingface: every column that holds numbers)."""

    length: int = 256
    """Tokens (text: bytes) per example."""

    dtype: str = ""
    """Type of token ids: uint8, uint16 or uint32. Raw token files need it; .npy files are checked against it."""

    vocabulary: int = 0
    """Number of token ids. 0: 256 for text and synthetic_tokens, the largest id + 1 for tokens (found by reading every
    token once)."""

    packed: bool = False
    """Whether documents that share an example are kept apart: attention stays within a document, positions count from
    its start, and no token is predicted from another document. Documents end with byte 0 (texts) or `separator`."""

    tokenizer: str = ""
    """tokenizer.json of Hugging Face, or the folder that it is in: texts become its ids. Empty: they are bytes."""

    separator: int = -1
    """Token id that ends a document in the source tokens, and that is put after each row of token ids in jsonl and
    parquet; -1 = none. With `tokenizer`, the id that ends a text; -1 = the tokenizer's own. Bytes end with 0."""

    bad_records: int = 0
    """Records that may be left out because they cannot be read, in jsonl, parquet, huggingface and arrayrecord; each is
    said with its file and place. 0: the first one ends the run. Records that are read while training are counted by
    each process for itself."""

    eval_fraction: float = 0.05
    """Share of the data held out for evaluation, from 0 (no evaluation split) to below 1."""

    shuffle: bool = True
    """Whether each epoch visits the training examples in a new random order."""

    prefetch: int = 2
    """Batches read and placed on the mesh ahead of the step, by a background thread. 0: read on demand."""

    threads: int = 0
    """Further threads that read examples, for slow storage."""

    layout: Mapping[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    """Where the arrays of a batch are put before the step takes them, by the first regular expression that meets a
    whole name: one entry per dim, a mesh axis, null or a list of axes; {".*": [[data, fsdp, context, tensor]]} reads
    every row in one process and sends it to one device. Empty: where the step wants them, at once."""

    def __post_init__(self) -> None:
        problems = [*_problems(self)]
        if problems:
            raise UserError("\n".join(problems))


def part_config(config: DataConfig, number: int) -> DataConfig:
    """The config of one part of a mixture.

    Args:
        config: Of the mixture.
        number: Which part, in [0, len(config.mixture)).

    Raises:
        UserError: a value of the part is out of its range, or values contradict each other.
    """
    part = {key: value for key, value in config.mixture[number].items() if key != "weight"}
    lists = {key: tuple(value) for key, value in part.items() if isinstance(value, list)}
    return replace(config, **({"files": (), "eval_files": (), "mixture": ()} | part | lists))


def _problems(config: DataConfig) -> Iterator[str]:
    """Everything wrong with the values, each message with its config key."""
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
                yield f"data.mixture[{number}] reads the same as data.mixture[{first}]; give one, with both weights."
        try:
            whole_weights([part["weight"] for part in config.mixture], "data.mixture")
        except UserError as error:
            yield str(error)


def _own_problems(config: DataConfig) -> Iterator[str]:
    """As `_problems`, the parts of a mixture aside."""
    yield from _source_problems(config)
    yield from _mixture_problems(config)
    if config.length < 1:
        yield f"data.length={config.length}: an example needs at least 1 token."
    if config.records not in RECORDS:
        hint = did_you_mean(config.records, RECORDS)
        yield f"data.records={config.records!r}: a record holds {' or '.join(RECORDS)}.{hint}"
    if config.dtype not in ("", *TOKEN_DTYPES):
        yield f"data.dtype={config.dtype!r}: token ids are {', '.join(TOKEN_DTYPES)}."
    if not 0 <= config.vocabulary <= 2**31 - 1:
        yield f"data.vocabulary={config.vocabulary}: it is from 1 to 2**31 - 1 (ids are int32), or 0 for automatic."
    yield from _table_problems(config)
    if config.tokenizer and config.source in WITHOUT_TEXTS:
        yield f"data.tokenizer={config.tokenizer!r}: data.source={config.source} holds no texts; leave it out."
    yield from _packing_problems(config)
    if not 0 <= config.eval_fraction < 1:
        yield f"data.eval_fraction={config.eval_fraction}: it is a share of the data, from 0 to below 1."
    if config.bad_records < 0:
        yield f"data.bad_records={config.bad_records}: it is a number of records, 0 or more."
    if config.prefetch < 0:
        yield f"data.prefetch={config.prefetch}: it is a number of batches, 0 or more."
    if config.threads < 0:
        yield f"data.threads={config.threads}: it is a number of threads, 0 or more."


def _mixture_problems(config: DataConfig) -> Iterator[str]:
    """Are there parts where they are needed, and no files beside them?"""
    if config.source == "mixture" and not config.mixture:
        yield "data.source=mixture: it mixes the parts of data.mixture, and there are none; list them, with weights."
    elif config.source != "mixture" and config.mixture:
        yield f"data.mixture is set, but data.source={config.source} reads no parts; set data.source: mixture."
    if config.source == "mixture" and (config.files or config.eval_files):
        yield "data.source=mixture: its parts read files, each its own; put data.files and data.eval_files into them."


def _part_problems(config: DataConfig, number: int) -> Iterator[str]:
    """Everything wrong with one part of a mixture."""
    part = config.mixture[number]
    if not isinstance(part, Mapping):
        yield f"{part!r} is no part; write it as {{source: text, files: [...], weight: 1}}."
        return
    unknown = [key for key in part if key not in PART_TYPES]
    for key in unknown:
        yield f"{key} is no key of a part; the keys are {', '.join(PART_TYPES)}.{did_you_mean(str(key), PART_TYPES)}"
    missing = [key for key in ("weight", "source") if key not in part]
    if missing:
        yield f"{' and '.join(missing)} must be given."
    wrong = [key for key, value in part.items() if key in PART_TYPES and not _fits(value, PART_TYPES[key])]
    for key in wrong:
        yield f"{key}={part[key]!r} must be {_in_words(PART_TYPES[key])}."
    if unknown or missing or wrong:
        return
    if part["source"] == "mixture":
        yield "source=mixture: a part is no mixture itself; list its parts here, with their shares of the whole."
        return
    try:
        part_config(config, number)
    except UserError as error:
        yield from str(error).splitlines()


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value is of one of the types; lists are lists of texts."""
    if isinstance(value, list | tuple):
        return list in types and all(isinstance(item, str) for item in value)
    return isinstance(value, types) and not isinstance(value, bool)


def _in_words(types: tuple[type, ...]) -> str:
    words = {str: "text", list: "a list of files or globs", float: "a number", int: "a whole number"}
    return words[types[-1]] if list not in types else words[list]


def _table_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the keys of tables and images."""
    if config.source == "csv" and not config.target:
        yield "data.source=csv: data.target is missing; set it to the column to predict."
    if config.target and config.source not in TABLES:
        yield f"data.target={config.target!r}: data.source={config.source} is not a table; leave data.target out."
    if isinstance(config.columns, str):
        yield f"data.columns={config.columns!r} must be a list of columns; put the one into brackets."
    elif config.columns and not config.target:
        yield f"data.columns={list(config.columns)}: data.target is missing; set it to the column to predict."
    if config.image_size < 0:
        yield f"data.image_size={config.image_size} must be a number of pixels, 0 or more."
    if config.image_size and config.source != "images":
        yield f"data.image_size={config.image_size}: data.source={config.source} holds no images; leave it out."


def _packing_problems(config: DataConfig) -> Iterator[str]:
    """Can documents be told apart?"""
    given = f"data.separator={config.separator}"
    if not -1 <= config.separator < 2**31 - 1:
        yield f"{given}: it is a token id, from 0 to 2**31 - 2, or -1 for none."
    if config.vocabulary and config.separator >= config.vocabulary:
        yield f"{given}: data.vocabulary={config.vocabulary} has the ids 0 to {config.vocabulary - 1} alone."
    if config.separator >= 0 and config.source in ("stdlib", "text") and not config.tokenizer:
        yield f"{given}: data.source={config.source} ends each text with byte 0; leave data.separator out."
    if config.packed and (config.source in WITHOUT_DOCUMENTS or config.records == "arrays"):
        yield f"data.packed=True: data.source={config.source} holds no documents; leave data.packed out."
    if config.packed and config.source == "tokens" and config.separator < 0:
        yield "data.packed=True: set data.separator to the token id that ends a document in data.source=tokens."


def _source_problems(config: DataConfig) -> Iterator[str]:
    """Is the source known, and does it have the files it needs?"""
    for key in ("files", "eval_files"):
        if isinstance(getattr(config, key), str):
            yield f"data.{key}={getattr(config, key)!r}: it is a list of files or globs; put the one into brackets."
    if ":" in config.source:  # the user's own function may use `files` or not
        return
    known = (*EMBEDDED_SOURCES, *FILE_SOURCES, "mixture")
    if config.source not in known:
        hint = did_you_mean(config.source, known)
        yield f"data.source={config.source!r}: the sources are {', '.join(known)}, or module:function.{hint}"
    elif config.source in FILE_SOURCES and not config.files:
        yield f"data.source={config.source}: it reads files, and data.files is empty; give files or globs."
    elif config.source in EMBEDDED_SOURCES and (config.files or config.eval_files):
        yield (
            f"data.source={config.source}: it reads no files, but data.files or data.eval_files is set; "
            "remove them, or set data.source: text."
        )
