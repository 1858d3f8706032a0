"""`spmdkit train` in this process: what a run writes, how it goes on, and every kind of step it can be made of."""

import json
import shutil
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from runs import listing, losses, metrics, state_arrays, write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.launch.run import pauses
from spmdkit.launch.run import train as train_module
from spmdkit.launch.run.build import build
from spmdkit.launch.run.recorder import learning_rates
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.models import TransformerConfig, hugging_face, transformer

CONSTANT = {"learning_rate": 0.01}


def train(config, *overrides: str) -> None:
    assert main(["train", str(config), *overrides]) == 0


def test_what_a_run_leaves(tmp_path, capsys):
    config = write_config(tmp_path, run={"simulate": 8, "log_every": 5}, checkpoint={"every": 4, "keep": 2})
    train(config)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "compilation.json",
        "config.yaml",
        "goodput.jsonl",
        "metrics.jsonl",
        "provenance.json",
        "report.html",
        "report.json",
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


@pytest.mark.slow
def test_the_folder_of_a_run_goes_on_wherever_it_was_moved(tmp_path, capsys):
    train(write_config(tmp_path, optimizer=CONSTANT), "train.steps=2")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    train(moved)
    assert f"{moved} is finished: it holds step 2 of 2." in capsys.readouterr().out
    train(moved, "train.steps=4")
    assert f"Resuming {moved} at step 2 of 4." in capsys.readouterr().out
    assert [*losses(moved)] == [1, 2, 3, 4]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "strategy", ["{data: 8}", "{fsdp: {size: 8, floor_bytes: 64}}", "{fsdp: {size: 2, floor_bytes: 64}, data: -1}"]
)
def test_another_strategy_goes_on(strategy, whole, tmp_path):
    config = write_config(tmp_path, optimizer=CONSTANT)
    train(config, "train.steps=6")
    train(config, f"strategy={strategy}")
    expected = {record["step"]: record["loss"] for record in whole}
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


OWN_MODEL = """
import jax, jax.numpy as jnp
from spmdkit.parallel import BlockModel

def model(vocabulary, layers=5, width=8):
    def init(key):
        tokens, blocks, logits = (jax.random.normal(jax.random.fold_in(key, n), shape) for n, shape in enumerate(
            [(vocabulary, width), (layers, width, width), (width, vocabulary)]))
        return {"embed": {"tokens": tokens}, "blocks": {"kernel": blocks}, "head": {"logits": logits}}

    def embed(groups, batch, key):
        return groups["embed"]["tokens"][batch["inputs"]]

    def block(params, x, key):
        return jnp.tanh(x @ params["kernel"])

    def head(groups, x, batch, key):
        log_probability = jax.nn.log_softmax(x @ groups["head"]["logits"])
        losses = -jnp.take_along_axis(log_probability, batch["targets"][..., None], -1)[..., 0]
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    return BlockModel(init=init, embed=embed, block=block, head=head, num_blocks=layers)
"""
OWN = {"name": "own:model"}
TRANSFORMER = {"name": "transformer", "layers": 5, "width": 16, "heads": 2, "mlp_width": 32, "dropout": 0.1}
SAMPLE = {"length": 8, "prompt": "the mesh", "temperature": 0.0}


@pytest.mark.parametrize(
    ("schedule", "model", "sample"),
    [
        pytest.param("interleaved_1f1b", OWN, {"length": 0}, id="interleaved"),
        pytest.param("zbv", TRANSFORMER, SAMPLE, id="zbv", marks=pytest.mark.slow),
    ],
)
def test_blocks_stored_in_the_order_of_stages_go_on(schedule, model, sample, tmp_path, capsys):
    """Stopped and resumed, each step is that of the run that was not stopped, bit for bit; elsewhere nearly so.

    5 blocks lie in 4 places, the first of which holds two: no order that is its own inverse.
    """
    strategy = {"pipe": {"size": 2, "schedule": schedule, "microbatches": 2}, "data": 4}
    train_options = {"steps": 4, "global_batch": 16}
    sections = {"model": model, "strategy": strategy, "train": train_options, "sample": sample}
    often = {
        "eval": {"every": 2, "batches": 1},
        "checkpoint": {"every": 2, "keep": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    config = write_language_config(tmp_path, **sections, **often)
    (tmp_path / "own.py").write_text(OWN_MODEL)
    train(config)
    written = capsys.readouterr().out.partition("A sample of what it writes:")[2].partition("Wrote")[0]
    whole = metrics(tmp_path / "run")
    again, elsewhere = (tmp_path / name for name in ("again", "elsewhere"))
    for folder in (again, elsewhere):  # a run that was stopped after step 2
        shutil.copytree(tmp_path / "run", folder)
        shutil.rmtree(folder / "checkpoints" / "4")
        (folder / "report.html").unlink()
    train(config, f"run.dir={again}", "sample.length=0")
    assert metrics(again) == whole
    capsys.readouterr()
    train(config, f"run.dir={elsewhere}", "strategy={data: 8}")
    assert "Resuming" in (printed := capsys.readouterr().out)
    assert written in printed
    for name in ("loss", "eval_loss"):
        found, expected = ([r[name] for r in records if name in r] for records in (metrics(elsewhere), whole))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batches", [1, 0])
def test_an_evaluation_is_of_so_many_batches(batches, tmp_path, monkeypatch):
    """Those of `eval.batches`, 0 for the whole split; none of them twice."""
    seen, whole = [], pauses.measure

    def measure(step, params, given, state):
        def counted():
            for batch in given:
                seen.append(np.asarray(batch["example"])[np.asarray(batch["weights"]) > 0])
                yield batch

        return whole(step, params, counted())

    monkeypatch.setattr(pauses, "measure", measure)
    config = write_config(tmp_path)
    train(config, "train.steps=1", f"eval.batches={batches}", "checkpoint.every=0")
    split = build(load_config(config)).splits.evaluation
    assert np.concatenate(seen).tolist() == list(range(16 if batches else len(split)))


def test_the_deadline_of_a_save_reaches_its_writer(tmp_path, monkeypatch):
    given, original = [], ocp.AsyncOptions
    monkeypatch.setattr(ocp, "AsyncOptions", lambda **options: given.append(options) or original(**options))
    assert main(["train", str(write_config(tmp_path)), "timeouts.save=5000", "train.steps=1"]) == 0
    assert [options["timeout_secs"] for options in given] == [5000]


def test_data_threads_and_prefetching_change_nothing(whole, tmp_path):
    train(write_config(tmp_path, optimizer=CONSTANT), "data.threads=2", "data.prefetch=0")
    assert metrics(tmp_path / "run") == whole


@pytest.fixture
def nothing_compiles(monkeypatch):
    def compile_step(built):
        raise AssertionError("the step was compiled before all was checked")

    monkeypatch.setattr(train_module, "explain_built", compile_step)


SMALL_EVALUATION = """
import numpy as np
from spmdkit.data import Splits, from_arrays

def rows(number, **more):
    return {"inputs": np.ones((number, 64), np.float32), "targets": np.arange(number) % 10, **more}

def make(evaluation):
    splits = from_arrays(rows(64))
    return lambda config: splits._replace(evaluation=evaluation)

empty = make([])
weightless = make([{"inputs": np.ones(64, np.float32), "targets": np.int64(0)}])
renamed = make([{"images": np.ones(64, np.float32), "weights": np.float32(1)}])
labels = make(from_arrays(rows(20, targets=np.arange(20))).train)
fractions = make(from_arrays(rows(20, targets=np.full(20, 0.5))).train)
"""


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        (["train.global_batch=10000"], 2, "train.global_batch=10000 rows, but the training split holds 7772 examples"),
        (["run.seed=18446744073709551616"], 2, "run.seed=18446744073709551616 has to be from 0 to 2**32 - 1"),
        (["run.seed=4294967296"], 2, "run.seed=4294967296 has to be from 0 to 2**32 - 1"),
        (["data.source=evaluations:empty"], 2, "returned no examples for evaluation"),
        (
            ["data.source=evaluations:weightless"],
            2,
            "returned evaluation examples with inputs, targets; each also needs",
        ),
        (["data.source=evaluations:renamed"], 2, "but evaluation examples with images, weights; they have the same"),
        (
            ["data.source=evaluations:labels"],
            3,
            "targets of example 10 of the evaluation split is 10; model.classes=10",
        ),
        (
            ["data.source=evaluations:fractions"],
            3,
            "targets are float64; model.classes=10 needs whole numbers, 0 .. 9.",
        ),
        (
            ["model.classes=5"],
            3,
            "; model.classes=5 allows 0 .. 4. Raise it, or mend the data. Where it is padding, give it weight 0.",
        ),
        (["optimizer.learning_rate=1e39"], 2, "optimizer.learning_rate must be a number of float32"),
    ],
)
def test_a_command_that_cannot_work_leaves_no_trace(overrides, code, text, there, tmp_path, capsys, monkeypatch):
    (tmp_path / "evaluations.py").write_text(SMALL_EVALUATION)
    monkeypatch.delitem(sys.modules, "evaluations", raising=False)
    config = write_config(tmp_path)
    if there:
        (tmp_path / "run").mkdir()
    before = listing(tmp_path)
    assert main(["train", str(config), *overrides]) == code
    assert text in capsys.readouterr().err
    left = {name: file for name, file in listing(tmp_path).items() if "__pycache__" not in name}
    assert (left, (tmp_path / "run").exists()) == (before, there)


def test_the_first_batch_is_read_before_anything_is_written(tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.full(4000, 300, np.uint16))
    data = {"source": "tokens", "files": [str(tmp_path / "ids.npy")], "length": 16, "vocabulary": 256}
    model = {"name": "transformer", "layers": 1, "width": 16, "heads": 2, "mlp_width": 32}
    config = write_config(tmp_path, data=data, model=model, strategy={"data": 8})
    assert main(["train", str(config)]) == 3
    assert "ids.npy holds token id 300; data.vocabulary=256 allows 0 .. 255." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_used(tmp_path, capsys, nothing_compiles):
    config = write_config(tmp_path)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    for command in (["train"], ["launch", "--on", "local:2x4"]):
        assert main([*command, str(config)]) == 2
        assert f"{tmp_path}/run/metrics.jsonl is a folder; a run keeps a file of that name." in capsys.readouterr().err
        assert main([*command, str(config), f"run.dir={tmp_path}/{'n' * 300}"]) == 2
        assert "of run.dir cannot be made: File name too long." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


LISTED = """
import numpy as np
from spmdkit.data import Splits

def rows(last):
    targets = [*(row % 10 for row in range(15)), last]
    same = {"inputs": np.ones(64, np.float32), "weights": np.float32(1)}
    return [{**same, "targets": each} for each in np.int32(targets)]

def train(config):
    return Splits(rows(10), None, None, "listed")

def evaluation(config):
    return Splits(rows(0), rows(10), None, "listed")
"""


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_a_source_of_the_users_own_is_checked_where_it_is_read(split, tmp_path, capsys, monkeypatch):
    """Of a source that is not in memory nobody knows before; training stops at the batch, evaluation likewise."""
    (tmp_path / "listed.py").write_text(LISTED)
    monkeypatch.delitem(sys.modules, "listed", raising=False)
    config = write_config(tmp_path, train={"steps": 1, "global_batch": 16}, data={"source": f"listed:{split}"})
    assert main(["train", str(config)]) == 3
    printed = capsys.readouterr()
    assert f"targets of example 15 of the {split}" in printed.err
    assert "is 10; model.classes=10 allows 0 .. 9." in printed.err
    assert "warning: data.source=listed:" in printed.out
    assert (tmp_path / "run").exists() == (split == "evaluation")


def test_what_failed_does_not_stand_in_the_way_of_the_corrected_command(tmp_path):
    config = write_config(tmp_path, train={"steps": 1, "global_batch": 16}, eval={"every": 0, "batches": 1})
    assert main(["train", str(config), "train.global_batch=10000", "model.widths=[16]"]) == 2
    train(config)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, capsys):
    """The config of the run stays the one its checkpoints are from."""
    config = write_config(tmp_path, train={"steps": 1, "global_batch": 16}, eval={"every": 0, "batches": 1})
    train(config)
    before = listing(tmp_path)
    overrides = ["train.steps=2", "strategy={data: {size: 8, compress: int8}}"]
    assert main(["train", str(config), *overrides]) == 2
    assert "does not fit the state of this run" in capsys.readouterr().err
    assert listing(tmp_path) == before
    assert main(["train", str(config), "run.seed=3"]) == 2
    assert listing(tmp_path) == before
    assert main(["train", str(config), "run.seed=3", "--fresh"]) == 0
    assert (
        f"Moved the run in {tmp_path / 'run'} to {tmp_path / 'run.old-1'}: checkpoints, metrics.jsonl, report.html, "
        in (capsys.readouterr().out)
    )
    moved = {name.removeprefix("run/"): held for name, held in before.items() if name.startswith("run/")}
    assert listing(tmp_path / "run.old-1") == moved
    assert list(losses(tmp_path / "run")) == [1]
    assert losses(tmp_path / "run") != losses(tmp_path / "run.old-1")


OWN_OPTIMIZER = """
import optax, optax.contrib

def make(learning_rate):
    return optax.chain(optax.sgd(learning_rate), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5))
"""


def test_an_optimizer_that_asks_for_the_loss_goes_on(tmp_path):
    """Its state, in which the losses are, is saved and restored: the rate goes on falling from where it was."""
    (tmp_path / "my_plateau.py").write_text(OWN_OPTIMIZER, encoding="utf-8")
    optimizer = {"name": "my_plateau:make", "learning_rate": 0.01}
    config = write_config(tmp_path, optimizer=optimizer, run={"simulate": 8, "dir": str(tmp_path / "whole")})
    train(config, "train.steps=8", "eval.every=0")
    config = write_config(tmp_path, optimizer=optimizer, run={"simulate": 8, "log_every": 1})
    train(config, "train.steps=4", "eval.every=0")
    train(config, "train.steps=8", "eval.every=0", "strategy={data: 8}")
    found = losses(tmp_path / "run")
    assert {step: found[step] for step in (4, 8)} == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    scales = [state_arrays(config, step)["opt_state/1/scale"] for step in (4, 8)]
    assert 1 > scales[0] > scales[1] > 0


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


@pytest.mark.slow
def test_training_starts_from_the_weights_of_a_folder(tmp_path):
    """Steps of next to nothing leave them as they are; a step that goes on takes nothing from the folder any more."""
    sizes = TransformerConfig(vocabulary=256, length=16, layers=2, width=16, heads=2, head_norm=True)
    params = transformer(sizes).init(jax.random.key(9))
    hugging_face.save(tmp_path / "weights", sizes, params)
    given = {"model": {"name": "hugging_face", "folder": "weights"}}
    given |= {"strategy": {"fsdp": {"size": 2, "floor_bytes": 64}, "tensor": 2, "data": 2}}
    given |= {"optimizer": {"name": "sgd", "learning_rate": 1e-12}, "train": {"steps": 1, "global_batch": 8}}
    config = write_language_config(tmp_path, **given)
    train(config)
    hugging_face.save(tmp_path / "others", sizes, transformer(sizes).init(jax.random.key(8)))
    (tmp_path / "others/model.safetensors").replace(tmp_path / "weights/model.safetensors")
    train(config, "train.steps=2")
    kept = state_arrays(config, 2)
    for path, leaf in leaves_with_paths(params):
        np.testing.assert_allclose(kept[f"params/{path}"], leaf, rtol=1e-6, atol=1e-9)
