"""A light model for pipelines, and schedules written as text."""

import jax
from spmdkit.parallel import BlockModel
from spmdkit.parallel.schedule.schedule_table import Action, Kind, Schedule
from support import toy


def light(layers):
    """The pieces of `toy` with so many blocks, no two of them alike."""

    def init(key):
        blocks = jax.vmap(lambda key: toy.init(key)["blocks"])(jax.random.split(key, layers))
        return {**toy.init(key), "blocks": jax.tree.map(lambda leaf: leaf[:, 0], blocks)}

    return BlockModel(init=init, embed=toy.embed, block=toy.block, head=toy.head, num_blocks=layers)


# two stages, two microbatches, GPipe's order; a gradient is passed on before its W
TWO = """
F0,F1,,B0,W0,B1,W1
,F0,B0,F1,B1,W0,W1
"""


def parse(text: str, **fields) -> Schedule:
    """A table as it is written, unchecked; short lines are padded."""
    kinds = dict(zip("FRBW", list(Kind)[1:], strict=True))
    cells = [line.split(",") for line in text.split()]
    ticks = max(map(len, cells))

    def action(cell: str) -> Action | None:
        number, _, chunk = cell[1:].partition(".")
        return Action(kinds[cell[0]], int(number), int(chunk or 0)) if cell else None

    by_stage = tuple(tuple(map(action, line + [""] * (ticks - len(line)))) for line in cells)
    fields = {"name": "mine", "stages": len(by_stage), "microbatches": 2, **fields}
    return Schedule(by_stage=by_stage, **fields)
