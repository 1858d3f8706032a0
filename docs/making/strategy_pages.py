"""Makes docs/strategies/: a page for each strategy from its docstring, its options and its predicted collectives.

`make figures` writes the pages and their drawings; a test compares them with the output of this module.
"""

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.configs.config_text import field_help
from spmdkit.layouts.sizes import format_bytes
from spmdkit.parallel import Collective, ShardingPlan, Step
from spmdkit.parallel.sharding.strategies import STRATEGIES, option_types

from .layout_svg import draw

FOLDER = "strategies"
DRAWN = "blocks/mlp/up"
_INDENTED = re.compile(r"(?<=\n\n)(?: {4,}\S.*\n)+")


class Example(NamedTuple):
    """The example of a strategy on its page.

    Attributes:
        strategy: The section `strategy` of a config, for 8 devices.
        preset: A preset that trains with the strategy.
        options: The options of the axis that belong to the strategy; empty: all.
        model: The model, as Python.
        more: Further lines of the config.
    """

    strategy: str
    preset: str
    options: tuple[str, ...] = ()
    model: str = "transformer(TransformerConfig(vocabulary=256, length=64, layers=4, width=128))"
    more: str = ""


MOE = "moe(MoEConfig(vocabulary=256, length=64, layers=4, width=128))"
EXAMPLES = {
    "data": Example("{data: 8}", "data_parallel", ("size",)),
    "zero": Example("{data: {size: 8, zero: 2}}", "zero", ("zero", "floor_bytes")),
    "fsdp": Example("{fsdp: 4, data: 2}", "fsdp"),
    "tensor": Example("{tensor: 4, data: 2}", "tensor"),
    "context": Example("{context: 4, data: 2}", "context"),
    "expert": Example("{expert: 4, data: 2}", "moe", model=MOE),
    "pipeline": Example("{pipe: {size: 4, schedule: zb_h1, microbatches: 8}, data: 2}", "pipeline"),
    "diloco": Example(
        "{data: {size: 2, local_steps: 8}, fsdp: 4}",
        "diloco",
        ("local_steps", "outer_learning_rate", "outer_momentum"),
        more="train: {steps: 160}  # a multiple of local_steps\n",
    ),
    "compression": Example("{data: {size: 8, compress: int8}}", "compressed", ("compress",)),
}
"""File of a strategy in parallel/ -> its example."""

PROGRAM = """\
import jax
import numpy as np
import optax
import spmdkit
from spmdkit.models import {imports}

model = {model}
devices = [f"cuda:{{n}}" for n in range(8)]  # they do not have to exist: nothing runs
plan = spmdkit.lay_out(model, {strategy}, devices=devices)
step = spmdkit.build_step(model, optax.adamw(1e-3), plan)

tokens = jax.ShapeDtypeStruct((16, 64), np.int32)
batch = {{
    "inputs": tokens,
    "targets": tokens,
    "weights": jax.ShapeDtypeStruct((16, 64), np.float32),
    "example": jax.ShapeDtypeStruct((16,), np.int32),
}}
sent = step.cost(batch)
"""

PAGE = """\
# {title}

<!-- Made by docs/making/strategy_pages.py from the docstring of parallel/{file}.py; `make figures` renews it. -->

{summary}

| | |
|---|---|
| mesh axis | `{axis}` |
| splits | {splits} |
| try it | `spmdkit train {preset}` |
| source | [parallel/{file}.py](../../parallel/{file}.py) |

```yaml
run: {{simulate: 8}}
strategy: {strategy}
model: {{name: {model}, layers: 4, width: 128}}
{more}```

## When to use it

{use}

## State of each device

![{alt}](../pictures/strategies/{file}.svg)

## Algorithm

{how}

## Communication

{costs}

The model of the example, {rows} rows of {length} positions in float32, sends in one step:

{table}

Bytes count the full value on each device: the operand of an all-reduce or a reduce-scatter, the result of an
all-gather. `spmdkit explain` prints the same table for your config, and compares it with the compiled program.

## Options

{options}

[Configuration](../configuration.md) lists all keys.

## The same in Python

```python
{program}assert list(map(str, sent)) == [
{lines}
]
```

## Source

{source}
"""


class Made(NamedTuple):
    """A page and its drawing, as text."""

    page: str
    drawing: str


def make(name: str) -> Made:
    """Makes the page of one strategy.

    Args:
        name: Its file in parallel/, without ".py".
    """
    module = next(module for module in STRATEGIES.values() if module.__name__.endswith(f".{name}"))  # pyright: ignore
    example, parts = EXAMPLES[name], paragraphs(module.__doc__ or "")
    program = _program(example)
    step, sent = _run(program)
    title, _, summary = parts["summary"].partition(": ")
    alt = f"{title}: the state of each of 8 devices under {example.strategy}"
    page = PAGE.format(
        title=title,
        file=name,
        summary=summary[0].upper() + summary[1:],
        axis=module.AXIS,
        splits=_splits(module.AXIS, step.plan),
        preset=example.preset,
        strategy=example.strategy,
        model="moe" if example.model == MOE else "transformer",
        more=example.more,
        use=parts["use"],
        alt=alt,
        how=parts["how"],
        costs=parts["bytes"],
        rows=16,
        length=64,
        table=_table(sent),
        options=_options(module.AXIS, example.options),
        program=program,
        lines="\n".join(f'    "{line}",' for line in sent),
        source=parts["source"],
    )
    return Made(page, draw(step, DRAWN, sent, alt))


def write(docs: Path) -> None:
    """Writes all pages and drawings under docs/."""
    for name in EXAMPLES:
        made = make(name)
        for path, text in ((page_path(docs, name), made.page), (drawing_path(docs, name), made.drawing)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def page_path(docs: Path, name: str) -> Path:
    """Returns the path of the page of a strategy."""
    return docs / FOLDER / f"{name}.md"


def drawing_path(docs: Path, name: str) -> Path:
    """Returns the path of the drawing of a strategy."""
    return docs / "pictures" / FOLDER / f"{name}.svg"


def paragraphs(docstring: str) -> dict[str, str]:
    """Cuts a strategy's docstring into its parts: summary, use, how, bytes, source."""
    found: dict[str, list[str]] = {"summary": [], "use": [], "how": [], "bytes": [], "source": []}
    summary, *rest = re.split(r"\n\n(?=\S)", docstring.strip())
    found["summary"].append(summary)
    for paragraph in rest:
        kind = {"Use": "use", "Bytes": "bytes", "Source": "source", "Sources": "source"}
        found[kind.get(re.split(r"\W", paragraph)[0], "how")].append(paragraph)
    missing = [kind for kind, texts in found.items() if not texts]
    if missing:
        raise ValueError(f"the docstring that begins with {summary!r} has no paragraph on: {', '.join(missing)}")
    parts = {kind: as_markdown("\n\n".join(texts)) for kind, texts in found.items()}
    return parts | {"source": re.sub(r"^Sources?: ", "", parts["source"])}


def as_markdown(text: str) -> str:
    """Converts a docstring to Markdown for code hosts and the site: fenced code, lists indented by four."""
    text = _INDENTED.sub(_fenced, text + "\n")
    text = re.sub(r"^(\d+)\. ", r"\1.  ", text, flags=re.MULTILINE)
    return re.sub(r"^   (?=\S)", "    ", text, flags=re.MULTILINE).strip()


def _fenced(match: re.Match) -> str:
    lines = match[0].splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    outer = " " * (4 if indent > 4 else 0)  # inside a list
    body = "\n".join(outer + line[indent:] for line in lines)
    return f"{outer}```text\n{body}\n{outer}```\n"


def _splits(axis: str, plan: ShardingPlan) -> str:
    """Lists what the strategies of an axis split, including the optimizer's state if the plan's update splits it."""
    words = {"work": "the model's work"}
    split = [words.get(what, what) for each in STRATEGIES.values() if axis == each.AXIS for what in each.SPLITS]
    stored, update = (table.row(DRAWN).layout for table in (plan.table, plan.update_table))
    return ", ".join([*split, *(["the optimizer's state"] if update != stored else [])])


def _program(example: Example) -> str:
    imports = "MoEConfig, moe" if example.model == MOE else "TransformerConfig, transformer"
    strategy = re.sub(r"(\w+): ", r'"\1": ', example.strategy)
    strategy = re.sub(r": ([a-z]\w*)", r': "\1"', strategy)
    return PROGRAM.format(imports=imports, model=example.model, strategy=strategy)


def _run(program: str) -> tuple[Step, Sequence[Collective]]:
    names: dict[str, Any] = {}
    exec(program, names)
    return names["step"], names["sent"]


def _table(sent: Sequence[Collective]) -> str:
    rows = [
        f"| {line.kind} | {' x '.join(f'`{axis}`' for axis in line.axes)} | {line.count} | {format_bytes(line.bytes)} |"
        for line in sent
    ]
    return "\n".join(["| collective | over | times | bytes |", "|---|---|---|---|", *rows])


def _options(axis: str, own: Sequence[str]) -> str:
    kind = option_types()[axis]
    help_of = field_help(kind)
    rows = [
        f"| `strategy.{axis}.{field.name}` | `{_shown(field)}` | {help_of[field.name]} |"
        for field in fields(kind)
        if not own or field.name in own
    ]
    return "\n".join(["| key | default | description |", "|---|---|---|", *rows])


def _shown(field: Any) -> str:
    default = field.default if field.default is not MISSING else field.default_factory()
    return str(default).lower() if isinstance(default, bool) else "null" if default is None else str(default)
