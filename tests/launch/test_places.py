from importlib import import_module

import pytest
from spmdkit.launch import local
from spmdkit.launch.local import LocalTarget
from spmdkit.launch.places import PLACES, find_place


def test_local():
    assert find_place("local:2x4") == (local, LocalTarget(num_processes=2, devices=4))
    assert str(find_place("local:16x1")[1]) == "local:16x1"


@pytest.mark.parametrize("text", ["local", "local:2", "local:0x4", "local:2x", "local:2x4x1"])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match=r"--on .* is not a target; give local:PxD: P processes .* local:2x4"):
        find_place(text)


@pytest.mark.parametrize("text", ["2x4", "lcal:2x4", "", "os:system"])
def test_other_places_are_refused(text):
    with pytest.raises(ValueError, match=r"--on '.*' is no place to launch on\..* Give local:PxD"):
        find_place(text)


@pytest.mark.parametrize("text", ["local:257x1", "local:1x4097", f"local:1x{'9' * 5000}"])
def test_more_than_a_machine_runs(text):
    with pytest.raises(
        ValueError, match=r"one machine runs at most 256 processes of 4096 simulated devices. Give fewer."
    ):
        find_place(text)


def test_without_a_place_all_are_listed():
    with pytest.raises(ValueError, match="spmdkit launch has to be told where; give one of these:") as info:
        find_place(None)
    lines = str(info.value).splitlines()[1:]
    assert [line.split()[1].partition(":")[0].partition("[")[0] for line in lines] == [*PLACES]
    assert lines[0].endswith("  P processes here that simulate D CPU devices each, such as local:2x4")


@pytest.mark.parametrize("name", PLACES)
def test_every_place_has_the_same_functions(name):
    place = import_module(f"spmdkit.launch.{name}")
    assert all(callable(getattr(place, function)) for function in ("parse", "describe", "launch"))
