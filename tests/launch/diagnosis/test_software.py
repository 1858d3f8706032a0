import pytest
from spmdkit.launch.diagnosis.software import installed, software

SAME = {"spmdkit": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}


def test_what_is_installed_here():
    found = installed()
    assert {"spmdkit", "jax", "jaxlib"} <= set(found)
    assert [finding.level for finding in software(found)] == ["ok"]


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"jaxlib": "0.9.0"}, "jax 0.10.2 with jaxlib 0.9.0", "pip install jaxlib==0.10.2"),
        ({"jax-cuda13-plugin": "0.9.0"}, "jaxlib 0.10.2 with jax-cuda13-plugin 0.9.0", "pip install --upgrade"),
        (
            {"jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"},
            "plugins for jax-cuda12 and jax-cuda13 beside each other",
            "pip uninstall jax-cuda12-plugin",
        ),
    ],
)
def test_versions_that_do_not_fit(changes, found, fix):
    wrong = [finding for finding in software({**SAME, **changes}) if finding.level == "wrong"]
    assert [finding.found for finding in wrong] == [found]
    assert wrong[0].fix.startswith(fix)


def test_a_plugin_that_fits():
    assert [finding.level for finding in software({**SAME, "jax-cuda13-plugin": "0.10.2"})] == ["ok"]


def test_nothing_is_installed():
    assert software({})[-1].found == "jax and jaxlib not installed"
