"""A data source that misbehaves as environment variables say; tests put it beside a config as `misbehaving:rows`.

SLOW=1:0.05         rank 1 takes 0.05 s longer for every batch
DIE=1:4             rank 1 dies as by kill -9 once checkpoint 4 is there, once
FLIP=1:7:once       in rank 1 a bit of a copy of a parameter flips after step 7; once, or always
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from spmdkit.data import open_splits
from spmdkit.data.config import DataConfig

HERE = Path(__file__).parent


def asked(name: str) -> list[str]:
    """What is asked of this rank."""
    rank, _, rest = os.environ.get(name, "-1").partition(":")
    return rest.split(":") if rank == os.environ.get("SPMDKIT_PROCESS_ID", "0") else []


class Source:
    """The same examples, later or never."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]

    def take(self, indices: Any) -> Any:
        time.sleep(float((asked("SLOW") or ["0"])[0]) + float(os.environ.get("EACH", "0")))
        for step in asked("DIE"):
            died = HERE / f"died-{step}"
            if (HERE / "run" / "checkpoints" / step).exists() and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.source.take(indices)


def flip_after(step: int, *, once: bool) -> None:
    """Lets a bit flip in this process's second device after a step."""
    import jax
    from spmdkit.mesh.processes import local_copy
    from spmdkit.parallel.step.train_step import Step
    from support.faults import flip_in

    original = Step.__call__

    def call(self: Any, state: Any, batch: Any) -> Any:
        state, metrics = original(self, state, batch)
        flipped = HERE / "flipped"
        if int(local_copy(state.step)) == step and not (once and flipped.exists()):
            flipped.touch()
            state = flip_in(state, os.environ["FLIPPED"], jax.local_devices()[1], byte=2, bit=0)
        return state, metrics

    Step.__call__ = call


def rows(config: DataConfig) -> Any:
    """The source."""
    for _ in [None] if asked("FLIP") else []:
        step, how = asked("FLIP")
        flip_after(int(step), once=how == "once")
    found = open_splits(DataConfig(source="synthetic"))
    return found._replace(train=Source(found.train))
