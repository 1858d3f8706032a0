"""A real trace: the steps are in it, by number, where xprof and Perfetto look for them."""

import gzip
import json

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.profile import Profile


def traced_steps(folder):
    (file,) = folder.rglob("perfetto_trace.json.gz")
    with gzip.open(file) as text:
        events = json.load(text)["traceEvents"]
    return sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == "train")


@pytest.mark.parametrize(
    ("options", "steps", "start", "expected"),
    [
        pytest.param({"start": 3, "steps": 2}, 12, 0, [3, 4], id="a window"),
        pytest.param({"start": 3, "steps": 5}, 4, 0, [3, 4], id="the run is shorter"),
        pytest.param({"start": 3, "steps": 3}, 12, 4, [5], id="a run that goes on within it"),
    ],
)
def test_the_steps_of_the_window(options, steps, start, expected, tmp_path):
    played = play(Profile(**options), steps=steps, start=start, folder=tmp_path)
    assert traced_steps(tmp_path / "profile") == expected
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    assert len(played.said) == (steps == 12)


def test_a_window_that_is_over_is_not_traced(tmp_path):
    play(Profile(start=3, steps=2), start=5, folder=tmp_path)
    assert not (tmp_path / "profile").exists()


def test_numbers_out_of_range():
    with pytest.raises(UserError, match=r"start=0 has to be at least 1"):
        Profile(start=0)
