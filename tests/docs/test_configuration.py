"""docs/configuration.md lists the presets and all keys; test_figures.py holds them to what the commands print."""

import re

import figures
from spmdkit.configs.config_sources import preset_names
from spmdkit.configs.key_names import config_keys
from support.pages import ROOT

PAGE = ROOT / "docs" / "configuration.md"


def shown(command):
    """What the page shows of a command."""
    found = figures.figures(PAGE.read_text(encoding="utf-8"))
    return next(figure.body for figure in found if command in figure.command + figure.body)


def test_every_preset_is_listed():
    assert re.findall(r"^  (\w+)  ", shown("--list"), re.MULTILINE) == preset_names()


def test_every_key_is_listed():
    listed = set(re.findall(r"^  (\w+):", shown("--help-config"), re.MULTILINE))
    last_parts = {key.rpartition(".")[2] for key in config_keys() if key != "model.name" and key.count(".") == 2}
    sections = {key.rpartition(".")[2] for key in config_keys() if not key.startswith(("strategy.", "model.name"))}
    assert last_parts | sections <= listed
