"""The `data:` section of a config: the source, how it is cut into examples, and their order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from ..mesh.errors import UserError, did_you_mean, raise_problems
from ..mesh.files import LOCAL, is_url
from ..parallel.options import LocalPath, type_problems
from .shares import whole_weights

EMBEDDED_SOURCES = ("stdlib", "synthetic", "synthetic_tokens")
FILE_SOURCES = ("text", "tokens", "jsonl", "csv", "parquet", "images", "arrayrecord", "huggingface", "arrays")
TABLES = ("csv", "parquet")
WITHOUT_DOCUMENTS = ("synthetic", "synthetic_tokens", "arrays", "csv", "images")
WITHOUT_TEXTS = (*WITHOUT_DOCUMENTS, "tokens")
MAX_AHEAD = 1024
"""Batches read ahead, and threads that read them."""
Records = Literal["documents", "arrays"]
Dtype = Literal["", "uint8", "uint16", "uint32"]
Fraction = Annotated[float, Ge(0), Lt(1)]
TokenId = Annotated[int, Ge(-1), Le(2**31 - 2)]
Count = Annotated[int, Ge(0)]
Ahead = Annotated[int, Ge(0), Le(MAX_AHEAD)]


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One source of a mixture; keys that are not given have the value of the mixture."""

    weight: Annotated[float, Gt(0)]
    """The share of the part is weight / sum of weights."""
    source: str
    """A source other than mixture."""
    files: tuple[str, ...] = ()
    """Its files or globs."""
    eval_files: tuple[str, ...] = ()
    """Its files or globs of the evaluation split."""
    column: str | None = None
    """See `data.column`."""
    target: str | None = None
    """See `data.target`."""
    columns: tuple[str, ...] | None = None
    """See `data.columns`."""
    records: Records | None = None
    """See `data.records`."""
    dtype: Dtype | None = None
    """See `data.dtype`."""
    separator: TokenId | None = None
    """See `data.separator`."""
    eval_fraction: Fraction | None = None
    """See `data.eval_fraction`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of examples, how it is cut and split, and the order of examples.

    Raises:
        UserError: Values have the wrong type, are out of range or contradict each other; all problems at once.
    """

    source: str = "stdlib"
    """The source of examples: stdlib (the Python sources on this machine, as bytes), text (files as bytes), tokens
    (.npy or raw arrays of token ids), jsonl or parquet (one column of texts or token ids), huggingface (the same for a
    dataset saved on disk), arrayrecord (see `records`), arrays (.npz with inputs and targets), csv (a table of numbers,
    see `target`; parquet too), images (a directory with one subdirectory for each class), synthetic (noisy images
    of digits, 64 features), synthetic_tokens (random tokens), mixture (several of these, see `mixture`), or your own
    "module:function" (DataConfig -> Splits)."""

    mixture: tuple[MixturePart, ...] = ()
    """The parts of source: mixture, such as {source: text, files: ["a/*.txt"], weight: 7}: each part has the share
    weight / sum of weights of all samples, to within one. A part can also set files, eval_files, column, target,
    columns, records, dtype, separator and eval_fraction; all parts share the other keys."""

    files: tuple[str, ...] = ()
    """Files or globs ("corpus/**/*.txt") of the sources that read files; huggingface, images: directories."""

    eval_files: tuple[str, ...] = ()
    """Files or globs of the evaluation split; empty = eval_fraction of `files` is held out instead."""

    column: str = "text"
    """Column (jsonl: key) with the texts, or with lists of token ids."""

    target: str = ""
    """Column of a csv or parquet table that the model predicts: numbers, or texts as classes. Each row is then an
    example, with the other columns as its inputs. csv requires it; parquet without it is a column of texts or ids."""

    columns: tuple[str, ...] = ()
    """Columns of numbers that are the inputs of a table, in this order; empty = every column but `target`."""

    image_size: Count = 0
    """Height and width in pixels that images are scaled to; 0 = images already have one size."""

    records: Records = "documents"
    """The content of a record of arrayrecord, or of a row of huggingface: documents, a text or token ids (arrayrecord:
    ids of data.dtype if set, else the bytes of a text); arrays, an example that is read when a batch needs it
    (arrayrecord: as np.savez writes it; huggingface: every column of numbers)."""

    length: Annotated[int, Ge(1)] = 256
    """Tokens (text: bytes) per example."""

    dtype: Dtype = ""
    """Type of token ids: uint8, uint16 or uint32. Raw token files require it; .npy files must match it."""

    vocabulary: Annotated[int, Ge(0), Le(2**31 - 1)] = 0
    """Number of token ids; 0 = 256 for text and synthetic_tokens, the largest id + 1 for tokens (found by reading every
    token once)."""

    packed: bool = False
    """Keep documents that share an example apart: attention stays within a document, positions count from its start,
    and no token is predicted from another document. Documents end with byte 0 (texts) or `separator`."""

    tokenizer: LocalPath = ""
    """tokenizer.json of Hugging Face, or its directory: texts become its ids; empty = texts stay bytes."""

    separator: TokenId = -1
    """Token id that ends a document in the source tokens, and that is put after each row of token ids in jsonl and
    parquet; -1 = none. With `tokenizer`, the id that ends a text; -1 = the tokenizer's own. Bytes end with 0."""

    bad_records: Count = 0
    """Maximum number of records to leave out because they cannot be read, in jsonl, parquet, huggingface, images and
    arrayrecord; each is logged with its file and place; 0 = the first one ends the run. Each process counts the records
    that it reads while training."""

    eval_fraction: Fraction = 0.05
    """Share of the data held out for evaluation, from 0 (no evaluation split) to below 1."""

    shuffle: bool = True
    """Visit the training examples in a new random order in each epoch."""

    prefetch: Ahead = 2
    """Batches that a background thread reads and places on the mesh ahead of the step; 0 = read on demand."""

    threads: Ahead = 0
    """Further threads that read examples, for slow storage."""

    layout: Mapping[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    """Layout of the arrays of a batch before the step takes them, by the first regular expression that matches the
    whole name: one entry per dim, a mesh axis, null or a list of axes; {".*": [[data, fsdp, context, tensor]]} reads
    every row in one process and sends it to one device; empty = the step's layout at once."""

    @property
    def document_end(self) -> int | None:
        """The id that ends a document of token ids, or None."""
        return None if self.separator < 0 else self.separator

    def __post_init__(self) -> None:
        problems = type_problems("data", self)
        for number, part in enumerate([] if problems else self.mixture):
            problems += type_problems(f"data.mixture[{number}]", part)
        raise_problems(problems or _problems(self))


def part_config(config: DataConfig, number: int) -> DataConfig:
    """Returns the config of one part of a mixture.

    Args:
        config: The config of the mixture.
        number: The part, in [0, len(config.mixture)).

    Raises:
        UserError: Values of the part contradict each other.
    """
    part = config.mixture[number]
    values = {each.name: getattr(part, each.name) for each in fields(part) if each.name != "weight"}
    return replace(config, mixture=(), **{name: value for name, value in values.items() if value is not None})


def _problems(config: DataConfig) -> Iterator[str]:
    """Yields all contradictions between values, each message with its config key."""
    own = [*_source_problems(config), *_table_problems(config), *_packing_problems(config)]
    if config.tokenizer and config.source in WITHOUT_TEXTS:
        own.append(f"data.tokenizer={config.tokenizer!r}: data.source={config.source} does not contain texts.")
    yield from own
    for number in range(len(config.mixture)):
        try:
            part_config(config, number)
        except UserError as error:
            found = [problem for problem in str(error).splitlines() if problem not in own]
            yield from (f"data.mixture[{number}]: {problem}" for problem in found)
    if config.mixture:
        try:
            whole_weights([part.weight for part in config.mixture], "data.mixture")
        except UserError as error:
            yield str(error)


def _table_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the keys of tables and images."""
    if config.source == "csv" and not config.target:
        yield "data.source=csv: data.target is missing; set it to the column to predict."
    if config.target and config.source not in TABLES:
        yield f"data.target={config.target!r}: data.source={config.source} is not a table; leave data.target out."
    if config.columns and not config.target:
        yield f"data.columns={list(config.columns)}: data.target is missing; set it to the column to predict."
    if config.image_size and config.source != "images":
        yield f"data.image_size={config.image_size}: data.source={config.source} does not contain images; leave it out."


def _packing_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the end of documents."""
    given = f"data.separator={config.separator}"
    if config.vocabulary and config.separator >= config.vocabulary:
        yield f"{given}: data.vocabulary={config.vocabulary} allows only 0 .. {config.vocabulary - 1}."
    if config.separator >= 0 and config.source in ("stdlib", "text") and not config.tokenizer:
        yield f"{given}: data.source={config.source} ends each text with byte 0; leave data.separator out."
    if config.packed and (config.source in WITHOUT_DOCUMENTS or config.records == "arrays"):
        yield f"data.packed=True: data.source={config.source} does not contain documents; leave data.packed out."
    if config.packed and config.source == "tokens" and config.separator < 0:
        yield "data.packed=True: set data.separator to the token id that ends a document in data.source=tokens."


def _source_problems(config: DataConfig) -> Iterator[str]:
    """Yields the problems with the source, its files and its parts."""
    known = (*EMBEDDED_SOURCES, *FILE_SOURCES, "mixture")
    given = f"data.source={config.source}"
    has_files = bool(config.files or config.eval_files)
    if config.mixture and config.source != "mixture":
        yield f"data.mixture is set, but {given} does not have parts; set data.source: mixture."
    if ":" in config.source:  # the user's own function may use `files` or not, and may read URLs
        return
    for key in ("files", "eval_files"):
        for file in getattr(config, key):
            if is_url(file):
                yield f"data.{key} must contain {LOCAL.replace('a path', 'paths')}, got {file!r}."
    if config.source not in known:
        hint = did_you_mean(config.source, known)
        choices = f"choose from {', '.join(known)}, or module:function.{hint}"
        yield f"data.source={config.source!r} is not a known source: {choices}"
    elif config.source in FILE_SOURCES and not config.files:
        yield f"{given}: data.files is empty; give files or globs."
    elif config.source in EMBEDDED_SOURCES and has_files:
        yield f"{given} does not read files; remove data.files and data.eval_files, or set data.source: text."
    elif config.source == "mixture" and not config.mixture:
        yield f"{given}: data.mixture is empty; list the parts of the mixture. A part cannot be a mixture."
    elif config.source == "mixture" and has_files:
        yield f"{given}: each part has its own files; put data.files and data.eval_files into the parts."
