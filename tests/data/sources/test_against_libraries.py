"""Loaders as other libraries make them: a run trains on their rows, and a worker that is killed is named."""

import numpy as np
import pytest
from spmdkit.data import from_batches, from_dataset, from_examples
from support.runs import losses, spmdkit, write_config

pytestmark = [pytest.mark.libraries, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TF_DATA = """
import numpy as np, tensorflow as tf
from spmdkit.data import from_batches, from_examples

values = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
labels = np.arange(96) % 10

def dataset(epoch):
    rows = tf.data.Dataset.from_tensor_slices({"inputs": values, "targets": labels})
    return rows.shuffle(96, seed=epoch).map(lambda row: {**row, "inputs": row["inputs"] * 2})

def batched(config):
    return from_batches(lambda epoch: dataset(epoch).batch(20).prefetch(2), dataset(0).batch(50))

def single(config):
    return from_examples(dataset, dataset(0))
"""
TORCH = """
import os, signal
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from spmdkit.data import from_batches, from_dataset

class Rows(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, number):
        if os.environ.get("KILL") == str(number) and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        values = torch.from_numpy(np.random.default_rng(number).normal(size=8).astype(np.float32))
        return values, number % 10

def loader(workers):
    def epoch(number):
        order = torch.Generator().manual_seed(number)
        return DataLoader(Rows(), batch_size=20, shuffle=workers == 0, generator=order, num_workers=workers)
    return epoch

def plain(config):
    return from_batches(loader(0), DataLoader(Rows(), batch_size=32))

def workers(config):
    return from_batches(loader(2), DataLoader(Rows(), batch_size=32))

def dataset(config):
    return from_dataset(Rows(), eval_fraction=config.eval_fraction)
"""
HUGGING_FACE = """
import datasets
from spmdkit.data import from_dataset

def saved(config):
    return from_dataset(datasets.load_from_disk(config.files[0]).with_format("numpy"), eval_fraction=0.1)
"""


def run_on(tmp_path, name, text, function, *arguments, code=0, **variables):
    (tmp_path / f"{name}.py").write_text(text)
    source = {"source": f"{name}:{function}"}
    config = write_config(tmp_path, data=source, train={"steps": 12, "global_batch": 16})
    ended = spmdkit("train", config, *arguments, **variables)
    assert ended.returncode == code, ended.stderr
    return ended


@pytest.mark.parametrize("function", ["batched", "single"])
def test_tf_data(function, tmp_path):
    tf = pytest.importorskip("tensorflow")
    ended = run_on(tmp_path, "of_tf", TF_DATA, function, CUDA_VISIBLE_DEVICES="")
    assert f"stream of {'batches' if function == 'batched' else 'examples'} of" in ended.stdout
    assert len(losses(tmp_path / "run")) == 12
    rows = tf.data.Dataset.from_tensor_slices({"a": np.arange(6), "b": tf.ragged.constant([[1]] * 5 + [[1, 2]])})
    with pytest.raises(ValueError, match=r"^b (is a|holds|has)"):
        from_batches(rows.batch(6))
    with pytest.raises(ValueError, match="holds"):
        from_examples(tf.data.Dataset.from_tensors({"inputs": tf.constant("text")}))


@pytest.mark.parametrize("function", ["plain", "workers", "dataset"])
def test_torch(function, tmp_path):
    pytest.importorskip("torch")
    run_on(tmp_path, "of_torch", TORCH, function)
    assert len(losses(tmp_path / "run")) == 12


@pytest.mark.multiprocess
def test_a_killed_worker_of_a_DataLoader(tmp_path):
    """Its fourth batch is never made; the run ends with the exit code of the machine's fault, and says whose."""
    pytest.importorskip("torch")
    ended = run_on(tmp_path, "of_torch", TORCH, "workers", "eval.every=0", code=75, KILL="70")
    assert "has lost a worker process: DataLoader worker (pid" in ended.stderr


def test_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    values = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    rows = {"inputs": values.tolist(), "targets": (np.arange(96) % 10).tolist()}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    files = f"data.files=[{tmp_path}/saved]"
    run_on(tmp_path, "of_hf", HUGGING_FACE, "saved", files)
    arrays = ["data.source=huggingface", "data.records=arrays", files, f"run.dir={tmp_path}/arrays"]
    run_on(tmp_path, "of_hf", HUGGING_FACE, "saved", *arrays)
    assert len(losses(tmp_path / "arrays")) == 12
    loaded = from_dataset(datasets.load_from_disk(str(tmp_path / "saved")))
    np.testing.assert_allclose(loaded.train[3]["inputs"], values[3], rtol=1e-6)
