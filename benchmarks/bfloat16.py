"""How far strategies move the numbers when compute is bfloat16: the table of docs/equivalence.md.

    python benchmarks/bfloat16.py

Parameters, sums of gradients and the optimizer are float32, compute is bfloat16. Each strategy trains the same small
transformer from the same first values; printed are, relative to one device in bfloat16, the error of the first loss,
that of the first gradients (norm of the difference over the norm) and that of the loss after 20 AdamW steps. The
yardstick is the first line: one device in bfloat16 against one device in float32.
"""

from typing import Any, NamedTuple

from spmdkit.mesh.devices import simulate

simulate(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from spmdkit.models.transformer import TransformerConfig, transformer  # noqa: E402
from spmdkit.parallel import Precision, build_step, lay_out  # noqa: E402

STRATEGIES: dict[str, dict[str, Any]] = {
    "data 8": {"data": 8},
    "zero 2 over data 8": {"data": {"size": 8, "zero": 2, "floor_bytes": 1024}},
    "fsdp 8": {"fsdp": {"size": 8, "floor_bytes": 1024}},
    "tensor 4": {"tensor": 4},
    "context 4": {"context": 4},
    "pipe 4 (1f1b)": {"pipe": {"size": 4, "microbatches": 8}},
    "pipe 4 (zb_h1)": {"pipe": {"size": 4, "schedule": "zb_h1", "microbatches": 8}},
    "fsdp 2 x tensor 4": {"fsdp": {"size": 2, "floor_bytes": 1024}, "tensor": 4},
    "pipe 2 x fsdp 2 x tensor 2": {
        "pipe": {"size": 2, "schedule": "zb_h1", "microbatches": 4},
        "fsdp": {"size": 2, "floor_bytes": 1024},
        "tensor": 2,
    },
}
ROWS, STEPS = 16, 20
CONFIG = TransformerConfig(vocabulary=64, length=32, layers=4, width=64, heads=4, kv_heads=4, mlp_width=128)


class Figures(NamedTuple):
    """What a run left."""

    first: float
    gradients: Any
    last: float


def batches():
    """The same random rows for every strategy."""
    random = np.random.default_rng(0)
    for step in range(STEPS):
        tokens = random.integers(0, CONFIG.vocabulary, (ROWS, CONFIG.length + 1)).astype(np.int32)
        yield {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": (random.random((ROWS, CONFIG.length)) < 0.8).astype(np.float32),
            "example": np.arange(ROWS, dtype=np.int32) + step * ROWS,
        }


def run(strategy: dict[str, Any], compute: str) -> Figures:
    """Trains under one strategy."""
    model = transformer(CONFIG)
    sizes = [given["size"] if isinstance(given, dict) else given for given in strategy.values()]
    precision = Precision(compute=compute)
    devices = [f"cpu:{index}" for index in range(int(np.prod(sizes)))]
    step = build_step(
        model, optax.adamw(1e-3), lay_out(model, strategy, precision=precision, devices=devices), precision=precision
    )
    state, losses, gradients = step.init(0), [], None
    for batch in batches():
        if gradients is None:
            gradients = jax.tree.map(np.asarray, step.gradients(state, batch)[0])
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return Figures(losses[0], gradients, losses[-1])


def show(name: str, ours: Figures, reference: Figures) -> None:
    """Prints one line of the table."""
    difference = optax.tree.norm(jax.tree.map(np.subtract, ours.gradients, reference.gradients))
    gradient = float(difference / optax.tree.norm(reference.gradients))
    first, last = (abs(a - b) / abs(b) for a, b in ((ours.first, reference.first), (ours.last, reference.last)))
    print(f"| {name} | {first:.1e} | {gradient:.1e} | {last:.1e} |", flush=True)


def main() -> None:
    one = run({"data": 1}, "bfloat16")
    print(f"JAX {jax.__version__}\n\n| strategy | first loss | first gradients | loss after {STEPS} steps |")
    print("|---|---|---|---|")
    show("one device: bfloat16 against float32", one, run({"data": 1}, "float32"))
    for name, strategy in STRATEGIES.items():
        show(name, run(strategy, "bfloat16"), one)


if __name__ == "__main__":
    main()
