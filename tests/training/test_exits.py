import pytest
from spmdkit.mesh.simulate import simulate
from spmdkit.training.exits import report_error


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


def test_its_traceback_on_request(capsys, monkeypatch):
    monkeypatch.setenv("SPMDKIT_TRACEBACK", "1")
    assert report_error(mistake()) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_value_error_from_elsewhere_keeps_its_traceback(capsys):
    assert report_error(caught(lambda: int("x"))) == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert "ValueError: invalid literal" in printed


def test_an_error_may_name_its_exit_code(capsys):
    class Diverged(RuntimeError):
        exit_code = 3

    assert report_error(Diverged("loss is nan")) == 3
    assert capsys.readouterr().err == "error: loss is nan\n"


def test_control_c_means_try_again(capsys):
    assert report_error(KeyboardInterrupt()) == 75
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "code"), [(0, 0), (None, 0), (7, 7), ("bad", 1)])
def test_system_exit_keeps_its_code(given, code):
    assert report_error(SystemExit(given)) == code
