"""The examples in Python do what they say, in seconds."""

import numpy as np
import pytest
from support.runs import EXAMPLES, example

pytestmark = [pytest.mark.usefixtures("broadcasting"), pytest.mark.slow]


def test_a_loop_from_scratch(capsys):
    """Under 60 lines; it learns, and what it saved comes back on another mesh."""
    code = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in code if line.strip()]) < 60
    right, same = example("own_loop").main(steps=60)
    assert right > 0.5
    assert same
    assert "restored onto fsdp 8: True" in capsys.readouterr().out


def test_every_source_of_data():
    """Each is a small file of its kind; those that hold the same texts train alike."""
    from spmdkit.data.config import EMBEDDED_SOURCES, FILE_SOURCES

    found = example("data_sources").main()
    assert {*found} == {*FILE_SOURCES, *EMBEDDED_SOURCES, "mixture", "dataset", "loader"} - {
        "csv",
        "images",
        "synthetic",
        "synthetic_tokens",
    }
    assert all(4 < loss < 6 for loss in found.values())
    assert found["parquet"] == found["huggingface"]


@pytest.mark.long
def test_two_models_against_each_other():
    gan = example("gan")
    before = gan.main(steps=0)
    assert gan.main(steps=300) < 0.5 * before


def test_the_continuous_xor():
    assert example("xor").main() > 0.98


@pytest.mark.long
def test_a_trainer():
    """Under 30 lines; every held-out row is in the scores and in what is predicted."""
    code = (EXAMPLES / "trainer.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in code if line.strip()]) < 30
    scores, predicted = example("trainer").main()
    targets = np.random.default_rng(0).integers(0, 3, 5003)[4000:]
    assert predicted.shape == (1003, 3)
    assert scores["accuracy"] == pytest.approx((predicted.argmax(1) == targets).mean(), abs=1e-12)
    assert scores["accuracy"] > 0.8
