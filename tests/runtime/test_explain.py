"""What `spmdkit explain` says is what hand arithmetic and the compiled step say; it trains nothing."""

import json
import re
from dataclasses import replace
from functools import cache

import jax
import pytest
from jax import lax
from spmdkit.configs import load_config
from spmdkit.configs.config_sources import preset_names
from spmdkit.layouts.resolve import resolve
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.collectives import Collective
from spmdkit.planning.explain_run import explain
from spmdkit.runtime.explain import Explanation
from support.runs import EXAMPLES, trained, write_config

# fsdp 4, floor 256 bytes, float32:     64 x 32 / 4   32, whole   32 x 10 / 4   10, whole
PARAMETER_BYTES = 4 * sum((64 * 32 // 4, 32, 32 * 10 // 4, 10))
# 16 rows over 8 devices: 64 inputs, a target, a weight and an index, 4 bytes each
BATCH_BYTES = 16 // 8 * 4 * (64 + 1 + 1 + 1)
COUNTS = 2 * 4  # steps, counted by adam's moments and by the schedule


@pytest.fixture(scope="module")
def explained(tmp_path_factory) -> dict:
    """What a process of its own prints: one object and nothing else."""
    folder = tmp_path_factory.mktemp("explained")
    ended = trained("explain", write_config(folder), "--json")
    assert not (folder / "run").exists()
    return json.loads(ended.stdout)


@cache
def preset(name: str) -> Explanation:
    return explain(load_config(name)).explanation


def test_keys(explained):
    keys = "target mesh layouts bytes_per_device compiled_memory collectives predicted_collectives as_predicted"
    assert list(explained) == [*keys.split(), "not_as_predicted", "fewer_than_predicted", "notes"]
    assert {axis: size for axis, size in explained["mesh"].items() if size > 1} == {"data": 2, "fsdp": 4}


def test_bytes_are_those_of_hand_arithmetic(explained):
    assert explained["bytes_per_device"] == {
        "parameters": PARAMETER_BYTES,
        "optimizer": 2 * PARAMETER_BYTES + COUNTS,
        "gradients": PARAMETER_BYTES,
        "batch": BATCH_BYTES,
    }
    assert sum(row["bytes_per_device"] for row in explained["layouts"]) == PARAMETER_BYTES


def test_compiled_memory_adds_up(explained):
    memory = explained["compiled_memory"]
    assert memory["total"] == memory["arguments"] + memory["outputs"] + memory["temporaries"] - memory["aliased"]
    held = sum(explained["bytes_per_device"].values()) - explained["bytes_per_device"]["gradients"]
    assert held <= memory["arguments"] <= held + 64  # and the number of the step, and the key
    assert memory["aliased"] >= held - BATCH_BYTES  # the state is donated


def test_collectives(explained):
    assert explained["as_predicted"] is True
    assert explained["not_as_predicted"] == []
    assert explained["collectives"] == explained["predicted_collectives"]
    gathers = [line for line in explained["collectives"] if line["kind"] == "all-gather"]
    assert [(line["axes"], line["count"]) for line in gathers] == [(["fsdp"], 2)]


def test_as_tables(tmp_path, cli):
    text = cli(0, "explain", write_config(tmp_path)).out
    for part in ("data=2, fsdp=4: 8 devices", "layers/0/kernel  64x32", "parameters", "temporaries"):
        assert part in text
    assert "Collectives of the compiled step, exactly as predicted" in text
    assert not (tmp_path / "run").exists()


def explanation(**changes) -> Explanation:
    """One of a matrix on two devices."""
    mesh = DeviceMesh.simulated(2, data=2)
    found = (Collective("all-reduce", ("data",), 12_345, 3 << 30),)
    given = {
        "mesh": str(mesh),
        "axes": {"data": 2},
        "table": resolve({"w": jax.ShapeDtypeStruct((2, 3), "float32")}, mesh),
        "bytes_per_device": {"parameters": 24},
        "compiled": {"total": 27_204_784},
        "predicted": found,
        "found": found,
    }
    return Explanation(**given | changes)


def test_numbers_are_written_for_people():
    text = str(explanation())
    assert re.search(r"^  all-reduce +over data +12,345 a step +3 GiB$", text, re.MULTILINE)
    assert re.search(r"^  total +25.9 MiB$", text, re.MULTILINE)


def test_each_row_that_differs_is_named_with_its_bytes_and_a_remedy():
    """And the remedy is where it says it is."""
    (line,) = explanation().found
    row = "all-reduce over data: 12,345 moving 2 bytes predicted, 12,345 moving 3,221,225,472 bytes found"
    found = explanation(predicted=(replace(line, bytes=2),), unexpected=(row,))
    text = str(found)
    assert "Collectives of the compiled step, NOT as predicted\n  all-reduce " in text
    assert f"\n\nNot as predicted\n  {row}\n" in text
    assert found.to_json()["not_as_predicted"] == [row]
    page, part = re.search(r"https://\S+/(\S+)\.html#([\w-]+)", text).groups()
    headings = re.findall(r"^## (.*)$", (EXAMPLES.parent / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.M)
    assert part in [heading.lower().replace(" ", "-") for heading in headings]
    assert "Not as predicted" not in str(explanation())


def test_fewer_collectives_are_a_remark():
    row = "all-reduce over data: 3 moving 24 bytes predicted, 2 moving 24 bytes found: XLA merged 1 with others"
    found = explanation(predicted=(), fewer=(row,))
    text = str(found)
    assert "Collectives of the compiled step, fewer than predicted\n" in text
    assert f"\n\nFewer than predicted, which is not a problem\n  {row}" in text
    assert "NOT as predicted" not in text
    assert found.to_json()["as_predicted"] is True
    assert found.to_json()["fewer_than_predicted"] == [row]


def test_what_is_left_to_xla_is_marked_and_as_predicted():
    (line,) = explanation().found
    text = str(explanation(predicted=(), left_to_xla=(line,)))
    assert "Collectives of the compiled step, as predicted\n" in text
    assert re.search(r"12,345 a step +3 GiB   left to XLA$", text, re.MULTILINE)


@pytest.mark.slow
def test_one_that_nobody_predicts(tmp_path, monkeypatch, cli):
    """A sum too many in the runtime, as a strategy with a mistake would have it."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return summed, [scalars[0] + 0 * lax.psum(lax.pcast(scalars[0], "data", to="varying"), "data"), *scalars[1:]]

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    text = cli(0, "explain", write_config(tmp_path)).out
    assert "NOT as predicted" in text
    assert re.search(r"^  all-reduce over data: \d+ moving [\d,]+ bytes predicted, \d+ moving", text, re.MULTILINE)


@pytest.mark.long_cases("context", "hsdp", "mixtral_8x7b", "moe", "pipeline", "qwen3_8b")
@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_presets_are_as_predicted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    explanation = preset(name)
    assert explanation.predicted == explanation.found
    assert explanation.found
    assert ("Pipeline schedule" in str(explanation)) == (explanation.axes["pipe"] > 1)
    assert not list(tmp_path.iterdir())
