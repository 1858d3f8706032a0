"""What is known of a run before it trains, and why it cannot be; in this process and in one of its own."""

import pytest
from runs import listing, write_config
from spmdkit.configs import load_config
from spmdkit.launch.run.explain import explain
from spmdkit.launch.sweeping.look import look, look_apart
from spmdkit.mesh.errors import UserError


def test_it_is_what_explain_says_and_nothing_is_written(tmp_path):
    config = load_config(write_config(tmp_path))
    before = listing(tmp_path)
    found, explained = look(config), explain(config)
    assert found == {
        "devices": 8,
        "predicted_bytes": explained.compiled["total"],
        "collective_bytes": sum(line.bytes for line in explained.found),
    }
    assert found["collective_bytes"] > 0
    assert listing(tmp_path) == before


def test_a_state_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("spmdkit.launch.run.guarding.memory._physical_bytes", lambda: 10_000)
    with pytest.raises(UserError, match="The state of this run does not fit"):
        look(load_config(write_config(tmp_path)))


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        look(load_config(config))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_process_of_its_own_says_why_it_cannot_be(tmp_path):
    """With the words of `train`; what the user's code prints is no part of them."""
    (tmp_path / "mine.py").write_text("print('hello')\ndef make(config):\n    return 3\n")
    config = write_config(tmp_path, data={"source": "mine:make"})
    seen = look_apart(str(config), [])
    assert (seen.exit_code, seen.costs) == (2, {})
    assert seen.problem.startswith("data.source=")
    assert "hello" not in seen.problem


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_the_users_code_prints_is_no_part_of_the_answer(tmp_path):
    opened = (
        "    from spmdkit.data import DataConfig, open_splits\n    return open_splits(DataConfig(source='synthetic'))\n"
    )
    (tmp_path / "mine.py").write_text(f"print('hello')\ndef make(config):\n{opened}")
    seen = look_apart(str(write_config(tmp_path, data={"source": "mine:make"})), [])
    assert (seen.problem, seen.exit_code) == ("", 0)
    assert seen.costs["devices"] == 8
