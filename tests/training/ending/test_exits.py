import pytest
from spmdkit.configs import ConfigError
from spmdkit.data import BadDataError
from spmdkit.layouts import LayoutError
from spmdkit.mesh.simulate import simulate
from spmdkit.training import quantities
from spmdkit.training.checkpointing.checkpoints import CheckpointError, SaveFailed
from spmdkit.training.ending.exits import MARK, RELAYED, report_error
from spmdkit.training.steps.not_finite import Diverged


def caught(function) -> BaseException:
    with pytest.raises(BaseException) as info:
        function()
    return info.value


def mistake() -> BaseException:
    return caught(lambda: simulate(0))


def test_a_users_mistake_is_one_message(capsys):
    assert report_error(mistake()) == 2
    printed = capsys.readouterr().err
    assert printed == "error: simulate(0): the number of simulated devices must be at least 1.\n"


def test_a_launcher_gets_its_last_words_marked(capsys, monkeypatch):
    for name, value in RELAYED.items():
        monkeypatch.setenv(name, value)
    assert report_error(caught(lambda: int("x"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(MARK) for line in lines)
    assert lines[0] == f"{MARK}Traceback (most recent call last):"
    assert "Please report it" in lines[-1]


def test_its_traceback_on_request(capsys, monkeypatch):
    monkeypatch.setenv("SPMDKIT_TRACEBACK", "1")
    assert report_error(mistake()) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ours",
    [
        lambda: int("x"),
        lambda: max(()),
        lambda: list(zip((1,), (), strict=True)),
        lambda: {}["key"],
        lambda: next(iter(lay_out_nothing())),
    ],
)
def test_an_error_of_ours_keeps_its_traceback_and_asks_to_be_reported(ours, capsys):
    """Also a ValueError, and also where the line that raised it is in this package."""
    assert report_error(caught(ours)) == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert "Please report it" in printed


def lay_out_nothing():
    """A programming error whose innermost frame is a module of spmdkit: it is not taken for the user's mistake."""
    return quantities.compact(None)  # pyright: ignore[reportArgumentType]


def test_every_error_class_of_the_package_has_an_exit_code():
    """Whatever is raised for its reader is a UserError, or names its code itself."""
    for kind in (ConfigError, LayoutError, BadDataError, CheckpointError, SaveFailed, Diverged):
        assert kind.exit_code in (2, 3, 75), kind


def test_an_error_may_name_its_exit_code(capsys):
    class Late(RuntimeError):
        exit_code = 3

    assert report_error(Late("loss is nan")) == 3
    assert capsys.readouterr().err == "error: loss is nan\n"


def test_control_c_means_try_again(capsys):
    assert report_error(KeyboardInterrupt()) == 75
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "code"), [(0, 0), (None, 0), (7, 7), ("bad", 1)])
def test_system_exit_keeps_its_code(given, code):
    assert report_error(SystemExit(given)) == code
