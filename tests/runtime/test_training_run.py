"""Steps of a run, whatever it is made of: it goes on where it was, under another strategy too, to the same numbers."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from spmdkit.checkpoints.manager import Restored
from spmdkit.configs import Config, load_config
from spmdkit.mesh.errors import UserError
from spmdkit.runtime import training_run
from spmdkit.runtime.build_run import build
from spmdkit.runtime.ownership import DirectoryInUse
from spmdkit.runtime.training_run import TrainingRun
from spmdkit.training import loop
from support.runs import losses, metrics, train, write_config, write_language_config

CONSTANT = {"learning_rate": 0.01}


@pytest.mark.parametrize(
    ("stopped_after", "end", "is_complete", "code"),
    [(None, "", True, 0), (7, "finished", True, 0), (4, "finished", False, 0), (7, "interrupted", False, 0)],
)
def test_ends_of_a_run_that_began_at_step_4(stopped_after, end, is_complete, code):
    run = object.__new__(TrainingRun)
    run.start, run.stopped_after = 4, stopped_after
    run.hooks = SimpleNamespace(conductor=SimpleNamespace(ended=SimpleNamespace(end=end)))
    assert (run.is_complete, run.exit_code) == (is_complete, code)


@pytest.mark.parametrize(("fresh", "found"), [(False, 8), (True, 0)])
def test_claims_its_directory_unless_another_job_trained_in_it(fresh, found, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(training_run, "claim_directory", lambda *_: None)
    monkeypatch.setattr(training_run, "write_config", lambda *_, fresh: [f"{fresh=}"])
    run = object.__new__(TrainingRun)
    vars(run).update(folder=tmp_path, fresh=fresh, latest=found, ownership=None, provenance=None, identity=None)
    run.built = SimpleNamespace(config=load_config(write_config(tmp_path)))
    run.display = SimpleNamespace(message=lines.append)
    run.checkpoints = SimpleNamespace(latest=lambda: 8, keep_aside=lambda steps: [f"damaged-{step}" for step in steps])
    run.claim_directory([12])
    assert lines == ["Kept as damaged-12.", f"{fresh=}"]
    run.latest = 4
    with pytest.raises(DirectoryInUse, match=rf"held step 4 when this command began, and holds step {found} now"):
        run.claim_directory([])
    monkeypatch.setattr(training_run, "is_main_process", lambda: False)  # process 0 checks and moves for all
    run.claim_directory([12])
    assert lines[2:] == [f"{fresh=}"]


@pytest.mark.parametrize("is_main", [True, False])
def test_going_back_suspends_restores_and_drops_in_order(is_main, monkeypatch):
    done, run = [], object.__new__(TrainingRun)

    def noted(name, answer=None):
        return lambda *given: done.append((name, *given)) or answer

    monkeypatch.setattr(training_run, "is_main_process", lambda: is_main)
    monkeypatch.setattr(training_run, "check_same_step", noted("same step"))
    monkeypatch.setattr(training_run, "StepHooks", lambda run, start: ("hooks", start))
    rollbacks = type("OfOne", (list,), {})([1])
    rollbacks.add, rollbacks.write = noted("add"), noted("write", "Went back.")
    run.built, run.rollbacks = SimpleNamespace(config=Config()), rollbacks
    run.guards = SimpleNamespace(suspend=noted("suspend"), roll_back=noted("roll back"))
    run.checkpoints = SimpleNamespace(wait=noted("wait"), latest=lambda: 8, keep_aside=noted("keep aside"))
    run.gate, run.ownership = SimpleNamespace(go_back=noted("drop requests")), SimpleNamespace(check=noted("check"))
    run.display = SimpleNamespace(message=noted("print"))

    def first_state():
        done.append(("restore", run.start, run.hooks))
        run.start = 4  # checkpoint 8 is damaged
        return "state", [8], ""

    run.first_state = first_state
    assert run.roll_back(10, "the loss is nan") == "state"
    assert done == [
        *[("suspend",), ("wait",), ("same step", 8, 300, "the step to go back to, 2")],
        *[("add", 10, "the loss is nan", 8), ("restore", 8, ("hooks", 8)), ("drop requests", 4, "going back, 2", 300)],
        *[("check",), ("write", 4), ("print", "Went back."), *[("keep aside", [8])] * is_main, ("roll back", 4)],
    ]


def test_resume_compares_the_position_of_the_data(tmp_path):
    run = object.__new__(TrainingRun)
    run.start, run.folder, run.built = 4, tmp_path, SimpleNamespace(config=Config())
    run.display, run.hooks = SimpleNamespace(message=print), SimpleNamespace(seen=SimpleNamespace())
    notes, run.rollbacks = {"data": {"batches": 5, "left_out": []}}, SimpleNamespace(left_out=())
    found = Restored(4, None, {})
    run.checkpoints = SimpleNamespace(restore_newest=lambda *_: found, notes=lambda step: notes)
    with pytest.raises(UserError, match="step 4 was saved after 5 batches of the data"):
        run.first_state()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of 12 steps without a stop, at a constant rate."""
    folder = tmp_path_factory.mktemp("whole")
    train(write_config(folder, optimizer=CONSTANT))
    return metrics(folder / "run")


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


@pytest.mark.slow
def test_a_run_that_has_done_more_steps_than_the_config_asks_for_is_only_reported(tmp_path, cli):
    config = write_config(tmp_path, optimizer=CONSTANT)
    train(config, "train.steps=4")
    (tmp_path / "run" / "report.json").unlink()
    said = cli(0, "train", config, "train.steps=2").out
    assert "after 4 steps." in said
    assert f"Wrote {tmp_path / 'run' / 'report.html'}" in said
    assert [*losses(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.slow
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


@pytest.mark.slow_cases("interleaved")
@pytest.mark.long_cases("zbv")
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
    often = {"eval": {"every": 2, "batches": 1}, "checkpoint": {"every": 2, "keep": 2}}
    config = write_language_config(tmp_path, optimizer={"learning_rate": 0.1}, **sections, **often)
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


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("batches", [1, 0])
def test_an_evaluation_is_of_so_many_batches(batches, tmp_path, monkeypatch):
    """Those of `eval.batches`, 0 for the whole split; none of them twice."""
    seen, whole = [], loop.measure

    def measure(step, params, given, state):
        def counted():
            for batch in given:
                seen.append(np.asarray(batch["example"])[np.asarray(batch["weights"]) > 0])
                yield batch

        return whole(step, params, counted())

    monkeypatch.setattr(loop, "measure", measure)
    config = write_config(tmp_path)
    train(config, "train.steps=1", f"eval.batches={batches}", "checkpoint.every=0")
    split = build(load_config(config)).splits.evaluation
    assert np.concatenate(seen).tolist() == list(range(16 if batches else len(split)))
