"""Fine-tunes weights of Hugging Face on 8 devices, and writes them back: `python examples/fine_tune.py FROM TO`.

FROM is a folder with config.json and .safetensors files, of the Llama, Qwen2, Qwen3 or GPT-2 family; where there is
none, a tiny Qwen3 is made. `transformers` loads what is written to TO. The tokens are this file's bytes; give your own
tokenizer's.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from spmdkit.models import TransformerConfig, hugging_face, transformer

import spmdkit

STEPS, ROWS, LENGTH = 8, 8, 64


def make_tiny(folder: Path) -> None:
    """Writes a Qwen3 of 100,000 parameters with random weights."""
    sizes = TransformerConfig(vocabulary=256, length=LENGTH, layers=2, width=64, heads=4, kv_heads=2, head_norm=True)
    hugging_face.save(folder, sizes, transformer(sizes).init(jax.random.key(0)))


def batches(seed: int):
    """Windows of this file's bytes, and the bytes that follow."""
    text, random = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32), np.random.default_rng(seed)
    for number in range(STEPS):
        first = random.integers(0, len(text) - LENGTH - 1, ROWS)
        rows = np.stack([text[start : start + LENGTH + 1] for start in first])
        yield {
            "inputs": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": np.ones((ROWS, LENGTH), np.float32),
            "example": np.arange(ROWS, dtype=np.int32) + number * ROWS,
        }


def fine_tune(source: Path, target: Path) -> list[float]:
    """Trains a few steps under fsdp x tensor x data; returns their losses."""
    if not source.exists():
        make_tiny(source)
    config, model, weights = hugging_face.load(source, length=LENGTH)
    strategy = {"data": 2, "fsdp": {"size": 2, "floor_bytes": 1024}, "tensor": 2}
    layouts = spmdkit.lay_out(model, strategy)
    step = spmdkit.build_step(model, optax.adamw(1e-2), layouts, clip_norm=1.0)
    state, losses = step.init(0, weights), []
    for batch in batches(seed=0):
        batch = {name: jax.device_put(value, layouts.batch_sharding()) for name, value in batch.items()}
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    hugging_face.save(target, config, state, like=source)
    return losses


if __name__ == "__main__":
    spmdkit.DeviceMesh.simulated(8)
    given = [Path(each) for each in sys.argv[1:]] or [Path("tiny-qwen3"), Path("tuned-qwen3")]
    for number, loss in enumerate(fine_tune(*given)):
        print(f"step {number}: loss {loss:.3f}")
