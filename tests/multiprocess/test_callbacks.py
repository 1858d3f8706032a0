"""Callbacks of two processes that would have it otherwise in each, at other times: both do the same, step by step."""

import json
import textwrap

import pytest
from support.processes import start, wait
from support.runs import losses, state_arrays, write_config

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 4000
OWN = textwrap.dedent(
    """
    import json, random, time
    from pathlib import Path
    from spmdkit.training.callbacks.callback import Callback
    from spmdkit.training.callbacks.rate_factor import in_parts
    import jax, optax

    def optimizer(learning_rate): return in_parts(optax.adam(learning_rate), {"last": "layers/1/.*"})

    class Wilful(Callback):
        '''Requests for whatever comes into its mind, by the clock, each rank for something else.'''

        changes_learning_rate = True

        def __init__(self, ends_after):
            self.random = random.Random(jax.process_index())
            self.ends_after, self.asked = ends_after, {"evaluate": 0, "save": 0, "scale": 0, "train": 0}

        def on_train_begin(self, run):
            self.file = (run.folder / f"heard-{jax.process_index()}.jsonl").open("w")
            self.next = time.monotonic() + 0.3
            self.end = time.monotonic() + self.ends_after * (1 - jax.process_index() / 2)

        def hear(self, event, run, **more):
            line = {"event": event, "step": run.step, "factor": run.learning_rate_factor, **run.parts, **more}
            print(json.dumps(line), file=self.file, flush=True)

        def ask(self, run):
            what = sorted(self.asked)[sum(self.asked.values()) * (1 + jax.process_index()) % 4]
            self.asked[what] += 1
            scale = lambda: run.scale_learning_rate(0.9)
            train = lambda: run.train_part("last", self.asked["train"] / 8 + jax.process_index())
            {"evaluate": run.evaluate, "save": run.save, "scale": scale, "train": train}[what]()

        def on_step_begin(self, run):
            time.sleep(self.random.random() * 0.004)
            now = time.monotonic()
            if now > self.end and sum(self.asked.values()) > 5:
                run.stop(f"rank {jax.process_index()} has had enough")
                self.end = self.next = float("inf")  # what is asked for after it would come too late
            elif now > self.next:
                self.next = now + self.random.random() * 0.8
                self.ask(run)

        def on_evaluation_end(self, run, metrics):
            self.hear("evaluation", run, **metrics)
            if self.random.random() < 0.5 and self.next < float("inf"):
                self.ask(run)

        def on_save_begin(self, run):
            self.hear("save", run)

        def on_train_end(self, run):
            self.hear("end", run, asked=self.asked)

    def make(ends_after): return Wilful(ends_after)
    """
)
SECTIONS = {"run": {"simulate": 8, "log_every": 1}, "train": {"steps": STEPS, "global_batch": 16}}
SECTIONS |= {"eval": {"every": 150, "batches": 2}, "checkpoint": {"every": 0, "keep": 2}}
SECTIONS["optimizer"] = {"learning_rate": 0.001}


def heard(folder, rank):
    return [json.loads(line) for line in (folder / f"heard-{rank}.jsonl").read_text().splitlines()]


def test_processes_agree_on_callback_requests(tmp_path):
    (tmp_path / "wilful.py").write_text(OWN)
    own = {"callbacks": [{"name": "wilful:make", "ends_after": 5}], "optimizer": {"name": "wilful:optimizer"}}
    config = write_config(tmp_path, **{**SECTIONS, **own})
    ended = wait(start(config, [[], []]), 120)
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    first, second = (heard(tmp_path / "run", rank) for rank in (0, 1))
    asked = [events.pop()["asked"] for events in (first, second)]
    assert first == second, "the same events at the same steps, with the same numbers"
    assert asked[0] != asked[1]
    assert all(asked[0].values()), "everything was asked for"
    kinds = [event["event"] for event in first]
    unscheduled = [each for each in first if each["event"] == "evaluation" and each["step"] % 150]
    assert unscheduled
    assert kinds.count("save") > 1
    step = max(losses(tmp_path / "run"))
    assert step < STEPS
    assert f"Complete after step {step} of {STEPS}: rank 0 has had enough." in ended[0].stdout
    state = state_arrays(config, step)
    assert state["opt_state/1/factors/learning_rate"] == pytest.approx(0.9 ** asked[0]["scale"], rel=1e-4)
    assert state["opt_state/0/1/factors/last"] == asked[0]["train"] / 8
