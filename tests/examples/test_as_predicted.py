"""Every example with a config: its collectives are those that are predicted, its training is that of one device."""

import shlex

import pytest
from spmdkit.configs import load_config
from spmdkit.planning.explain_run import explain
from spmdkit.runtime.verify import verify_config
from support.runs import EXAMPLES

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("broadcasting"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of Flax, in float64
    pytest.mark.filterwarnings("ignore::spmdkit.parallel.step.manual_axes.UncheckedStep"),  # of Equinox's batch norm
]
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def commands():
    """What each file says it is started with: the name of the file, and then the overrides."""
    for name in NAMES:
        lines = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        shown = [shlex.split(line)[4:] for line in lines if line.startswith("# spmdkit train")]
        yield from ((name, *overrides) for overrides in shown or [[]])


COMMANDS = {" ".join(given[:2]): given for given in commands()}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_moves_is_as_predicted(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *overrides = COMMANDS[command]
    found = explain(load_config(EXAMPLES / f"{name}.yaml", overrides)).explanation
    assert found.unexpected == found.fewer == ()
    if not found.left_to_xla:
        assert set(found.of_the_model) <= set(found.predicted)
    assert found.found
    assert "NOT as predicted" not in str(found)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_one_device(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = verify_config(load_config(EXAMPLES / f"{name}.yaml"))
    assert result.ok, str(result)
