import json

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.samples import NAME, Samples


class Writing:
    """Makes the run one that writes text, before samples look at it."""

    def prepare(self, run):
        run.generate = lambda prompt, length, temperature: f"{prompt}, {length} at step {run.step}"


def sampled(folder, *, every, steps, start=0, notes=None, saves=()):
    return play(
        Writing(), Samples(every=every, prompt="so", length=3),
        losses=[1.0], every=2, steps=steps, start=start, notes=notes, saves=saves, folder=folder,
    )  # fmt: skip


def kept(folder):
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_every_few_evaluations(tmp_path):
    played = sampled(tmp_path, every=2, steps=10)
    assert kept(tmp_path) == [{"step": step, "text": f"so, 3 at step {step}"} for step in (4, 8)]
    assert played.said == [f"Step {step} writes:\n\nso, 3 at step {step}\n" for step in (4, 8)]


def test_it_goes_on_counting_and_drops_what_comes_again(tmp_path):
    notes = sampled(tmp_path, every=2, steps=10, saves=(6,)).saved[6]
    sampled(tmp_path, every=2, start=6, steps=12, notes=notes)
    assert [each["step"] for each in kept(tmp_path)] == [4, 8, 12]


def test_a_model_that_writes_nothing():
    with pytest.raises(UserError, match="this one does not"):
        play(Samples(), losses=[1.0])
