"""The examples in Python do what they say, in seconds."""

import importlib.util
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def other_libraries_broadcast():
    with jax.numpy_rank_promotion("allow"):
        yield


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_loop_from_scratch(capsys):
    """Under 60 lines; it learns, and what it saved comes back on another mesh."""
    code = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in code if line.strip()]) < 60
    right, same = example("own_loop").main(steps=60)
    assert right > 0.5
    assert same
    assert "restored onto fsdp 8: True" in capsys.readouterr().out


@pytest.mark.slow
def test_every_source_of_data():
    """Each is a small file of its kind; those that hold the same texts train alike."""
    from spmdkit.data.config import EMBEDDED_SOURCES, FILE_SOURCES

    found = example("data_sources").main()
    assert {*found} == {*FILE_SOURCES, *EMBEDDED_SOURCES, "mixture", "dataset", "loader"} - {"synthetic"}
    assert all(4 < loss < 6 for loss in found.values())
    assert found["parquet"] == found["huggingface"]


@pytest.mark.slow
def test_two_models_against_each_other():
    gan = example("gan")
    before = gan.main(steps=0)
    assert gan.main(steps=300) < 0.5 * before


@pytest.mark.slow
def test_the_continuous_xor():
    assert example("xor").main() > 0.98
