"""`spmdkit train` in this process: what a run writes, how it goes on, and every kind of step it can be made of."""

import json

import jax
import numpy as np
import pytest
from runs import losses, metrics, state_arrays, write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.launch.build import build
from spmdkit.launch.cli import main
from spmdkit.launch.train import learning_rates

CONSTANT = {"learning_rate": 0.01}


def train(config, *overrides: str) -> None:
    assert main(["train", str(config), *overrides]) == 0


def test_what_a_run_leaves(tmp_path, capsys):
    config = write_config(tmp_path, run={"simulate": 8, "log_every": 5}, checkpoint={"every": 4, "keep": 2})
    train(config)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
    ]
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [8, 12]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 5, 8, 10, 12]
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8, 12]
    assert set(records[1]) == {
        "step",
        "loss",
        "grad_norm",
        "tokens_per_second",
        "seconds",
        "learning_rate",
        "flops_per_second",
    }
    rates = learning_rates(load_config(config))
    assert [record["learning_rate"] for record in records] == [float(rates[step - 1]) for step in (4, 5, 8, 10, 12)]
    printed = capsys.readouterr().out
    assert printed.startswith("mlp, 2,410 parameters, synthetic: 8,192 noisy images")
    assert "mesh data 2 x fsdp 4" in printed.partition("\n")[0]
    assert "step  4/12  loss " in printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of 12 steps without a stop, at a constant rate."""
    folder = tmp_path_factory.mktemp("whole")
    train(write_config(folder, optimizer=CONSTANT))
    return metrics(folder / "run")


def test_more_steps_go_on(whole, tmp_path, capsys):
    config = write_config(tmp_path, optimizer=CONSTANT)
    train(config, "train.steps=5")
    train(config)
    assert f"Resuming {tmp_path / 'run'} at step 5 of 12." in capsys.readouterr().out
    found = [{**record, "eval_loss": 0} for record in metrics(tmp_path / "run")]  # one more of those, at step 5
    assert found == [{**record, "eval_loss": 0} for record in whole]


@pytest.mark.parametrize(
    "strategy", ["{data: 8}", "{fsdp: {size: 8, floor_bytes: 64}}", "{fsdp: {size: 2, floor_bytes: 64}, data: -1}"]
)
def test_another_strategy_goes_on(strategy, whole, tmp_path):
    config = write_config(tmp_path, optimizer=CONSTANT)
    train(config, "train.steps=6")
    train(config, f"strategy={strategy}")
    expected = {record["step"]: record["loss"] for record in whole}
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_data_threads_and_prefetching_change_nothing(whole, tmp_path):
    train(write_config(tmp_path, optimizer=CONSTANT), "data.threads=2", "data.prefetch=0")
    assert metrics(tmp_path / "run") == whole


VARIANTS = {
    "bfloat16 compute": ["precision.compute=bfloat16"],
    "float64": ["precision={params: float64, compute: float64, reduce: float64}"],
    "accumulate 2": ["train.accumulate=2"],
    "no clipping": ["train.clip_norm=0"],
    **{name: [f"optimizer.name={name}"] for name in ("sgd", "adam", "lion", "adafactor", "muon")},
}


@pytest.fixture
def x64_as_before():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.usefixtures("x64_as_before")
def test_variants(name, tmp_path):
    config = write_config(tmp_path, optimizer={"learning_rate": 1e-3})
    train(config, "train.steps=3", "eval.every=0", "checkpoint.every=0", *VARIANTS[name])
    found = metrics(tmp_path / "run")
    assert [record["step"] for record in found] == [1, 2, 3]
    assert all(np.isfinite([record["loss"], record["grad_norm"]]).all() for record in found)
    stored = 8 if name == "float64" else 4
    folder = tmp_path / "run" / "checkpoints" / "3"
    assert folder.is_dir()
    if name == "float64":
        assert jax.config.jax_enable_x64
    else:
        overridden = write_config(tmp_path, optimizer={"learning_rate": 1e-3, **_optimizer(name)})
        params = {p: leaf for p, leaf in state_arrays(overridden, 3).items() if p.startswith("params/")}
        assert {leaf.dtype.itemsize for leaf in params.values()} == {stored}


def _optimizer(name: str) -> dict[str, str]:
    return {"name": name} if VARIANTS[name] == [f"optimizer.name={name}"] else {}


@pytest.mark.slow
def test_accumulation_and_remat_give_the_same_losses(tmp_path):
    """With dropout, whose masks follow the examples and not the devices or microbatches."""
    config, found = write_language_config(tmp_path), []
    for overrides in ([], ["train.accumulate=2", "train.remat=full"]):
        random, built = np.random.default_rng(0), build(load_config(config, overrides))
        shapes = jax.eval_shape(built.model.init, jax.random.key(0))
        params = jax.tree.map(lambda leaf, random=random: 0.1 * random.normal(size=leaf.shape), shapes)
        batch = {name: random.integers(0, 100, leaf.shape).astype(leaf.dtype) for name, leaf in built.batch.items()}
        state, losses = built.step.init(0, params=params), []
        for _ in range(3):
            state, metrics = built.step(state, batch)
            losses.append(float(metrics.loss))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len(set(found[0])) == 3
