from importlib import import_module

import pytest
from spmdkit.launch import local
from spmdkit.launch.launchers import LAUNCHERS, find_launcher
from spmdkit.launch.local import LocalTarget


def test_parses_local():
    assert find_launcher("local:2x4") == (local, LocalTarget(num_processes=2, devices=4))


def test_lists_all_launchers_without_on():
    with pytest.raises(ValueError, match="spmdkit launch needs a launcher") as info:
        find_launcher(None)
    lines = str(info.value).splitlines()[1:]
    assert [line.split()[1].partition(":")[0].partition("[")[0] for line in lines] == [*LAUNCHERS]
    assert lines[0].endswith("  P processes on this machine that simulate D CPU devices each, such as local:2x4")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_have_the_same_functions(name):
    place = import_module(f"spmdkit.launch.{name}")
    assert all(callable(getattr(place, function)) for function in ("parse", "describe", "launch"))
