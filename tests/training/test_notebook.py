"""`Trainer.fit` in a notebook: one panel in the cell, a short result, and an interruption that stops "Run all"."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SETUP = """
import signal

import jax
import numpy as np
import optax
import spmdkit

mesh = spmdkit.DeviceMesh.simulated(8, data=8)
x = np.random.default_rng(0).normal(size=(640, 4)).astype(np.float32)
y = x @ np.ones((4, 1), np.float32)

def init(key):
    return {"kernel": jax.random.normal(key, (4, 1))}

def loss(params, batch, key):
    errors = (batch["inputs"] @ params["kernel"] - batch["targets"]) ** 2
    return (errors[:, 0] * batch["weights"]).sum(), batch["weights"].sum()

trainer = spmdkit.Trainer((init, loss), optax.sgd(0.1), mesh)
"""
INTERRUPT = """
class Interrupt:
    def on_step_begin(self, run):
        if run.step == 45:
            signal.raise_signal(signal.SIGINT)

trainer.fit((x, y), steps=40, callbacks=[Interrupt()])
"""


@pytest.fixture(scope="module")
def run_cells(tmp_path_factory):
    """Runs cells in a Python kernel; returns the notebook, with the outputs of each cell."""
    import nbclient
    import nbformat

    def run(*sources):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        client = nbclient.NotebookClient(
            notebook,
            timeout=120,
            allow_errors=True,
            resources={"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}},
        )
        return client.execute().cells

    return run


def test_fit_shows_one_panel_and_a_short_result(run_cells):
    setup, fit, layouts, interrupted, after = run_cells(
        SETUP,
        "trainer.fit((x, y), steps=40)",
        "trainer.layouts",
        INTERRUPT,
        "print(trainer.steps)",
    )
    assert setup.outputs == []

    panel, result = fit.outputs
    assert panel.output_type == "display_data"
    assert "model, 4 parameters; mesh data 8" in panel.data["text/plain"]
    assert "40/40 100 %" in panel.data["text/plain"]
    assert panel.data["text/html"].startswith("<pre>")
    assert result.output_type == "execute_result"
    assert result.data["text/plain"].startswith("Fitted(steps=40, why='', loss=")

    assert "<td>kernel</td>" in layouts.outputs[0].data["text/html"]

    error = interrupted.outputs[-1]
    assert error.output_type == "error"
    assert error.ename == "Interrupted"
    assert "interrupted after step 4" in error.evalue

    assert 45 <= int(after.outputs[0].text) < 80
