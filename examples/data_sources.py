"""Every source of texts, tokens and arrays: makes a small file of each kind, and trains two steps on what it holds.

    python examples/data_sources.py                   all of them
    python examples/data_sources.py jsonl parquet     some

Text becomes bytes, so all sources of text, and token ids below 256, train one and the same model. Parquet and Hugging
Face datasets need `pip install 'spmdkit[parquet]'`, ArrayRecord files `pip install 'spmdkit[arrayrecord]'`.
"""

import io
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from spmdkit.data import DataConfig, MixturePart, from_batches, from_dataset, mix, open_splits

import spmdkit

LENGTH, ROWS = 16, 8
TEXTS = [f"text number {number} of a small corpus. " * 8 for number in range(20)]
IDS = np.random.default_rng(0).integers(0, 256, 2000)
EXAMPLES = {"inputs": IDS[:1600].reshape(100, LENGTH).astype(np.int32), "targets": IDS[1:1601].reshape(100, LENGTH)}


def opened(source, *files, **options):
    """What the `data` section {source: ..., files: [...]} of a YAML file opens."""
    return open_splits(DataConfig(source=source, files=tuple(map(str, files)), length=LENGTH, **options))


def stdlib(folder):
    """The sources of Python's standard library, as bytes: no file is needed."""
    return opened("stdlib")


def text(folder):
    """Each file is a document."""
    for number, each in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(each)
    return opened("text", folder / "*.txt")


def tokens(folder):
    """Token ids, memory-mapped: .npy, or raw numbers whose type `data.dtype` says."""
    np.save(folder / "ids.npy", IDS.astype(np.uint16))
    IDS.astype(np.uint8).tofile(folder / "ids.bin")
    return mix([(opened("tokens", folder / "ids.npy"), 1), (opened("tokens", folder / "ids.bin", dtype="uint8"), 1)])


def jsonl(folder):
    """One key of every line."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"body": each}) + "\n" for each in TEXTS))
    return opened("jsonl", folder / "rows.jsonl", column="body")


def parquet(folder):
    """One column: texts, or lists of token ids."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "rows.parquet")
    return opened("parquet", folder / "rows.parquet")


def huggingface(folder):
    """A dataset saved by the library `datasets`."""
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder))
    return opened("huggingface", folder)


def arrayrecord(folder):
    """A record is a text, or here an example, as `np.savez` writes it."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1")
    for number in range(len(EXAMPLES["inputs"])):
        record = io.BytesIO()
        np.savez(record, **{name: array[number].astype(np.int32) for name, array in EXAMPLES.items()})
        writer.write(record.getvalue())
    writer.close()
    return opened("arrayrecord", folder / "rows.array_record", records="arrays")


def arrays(folder):
    """Any arrays, rows on dim 0."""
    np.savez(folder / "rows.npz", **EXAMPLES)
    return opened("arrays", folder / "rows.npz")


def mixture(folder):
    """Several of these; of any number of samples each has its share."""
    for number, each in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(each)
    texts = MixturePart(source="text", files=(str(folder / "*.txt"),), weight=1)
    return opened("mixture", mixture=(MixturePart(source="stdlib", weight=3), texts))


def dataset(folder):
    """Anything with `len` and `[i]`, such as a PyTorch or Hugging Face `Dataset`."""
    return from_dataset([*zip(*EXAMPLES.values(), strict=True)])


def loader(folder):
    """Batches one after the other, such as those of a PyTorch `DataLoader` or a `tf.data.Dataset`."""

    def epoch(number):
        order = np.random.default_rng(number).permutation(100)
        for chosen in np.split(order, 10):
            yield {name: array[chosen] for name, array in EXAMPLES.items()}

    return from_batches(epoch)


SOURCES = (stdlib, text, tokens, jsonl, parquet, huggingface, arrayrecord, arrays, mixture, dataset, loader)


def init(key):
    """A table of logits: which byte follows which."""
    return {"table": jax.random.normal(key, (256, 256)) / 16}


def loss(params, batch, key):
    """Sums over the rows of one device."""
    losses = optax.softmax_cross_entropy_with_integer_labels(params["table"][batch["inputs"]], batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def main(names=()):
    """Trains two steps on each source; gives their losses by name."""
    mesh = spmdkit.DeviceMesh.simulated(8, data=2, fsdp=4)
    model = spmdkit.Model(init=init, loss=loss, name="bigrams")
    plan = spmdkit.lay_out(model, mesh)
    step = spmdkit.build_step(model, optax.adam(0.1), plan)
    found = {}
    for source in SOURCES:
        if names and source.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            splits, state = source(Path(folder)), step.init(seed=0)
            order = {"global_batch": ROWS, "seed": 0, "start_step": 0, "num_steps": 2}
            for batch in spmdkit.train_batches(splits.train, plan.batch_sharding(), **order):
                state, metrics = step(state, batch)
            found[source.__name__] = float(metrics.loss)
            print(f"{source.__name__:12} loss {found[source.__name__]:.4f}   {splits.description}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
