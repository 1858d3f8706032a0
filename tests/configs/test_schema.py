"""The schema itself: every key has a help, and a config of nothing but defaults is one that is taken."""

import dataclasses
from pathlib import Path

import pytest
from spmdkit.configs.help import field_help
from spmdkit.configs.schema import Config, RunConfig
from spmdkit.mesh.errors import UserError

SECTIONS = [field for field in dataclasses.fields(Config) if field.name != "source"]


def sections():
    """The dataclasses of all sections, and those inside them."""
    pending, found = [type(field.default_factory()) for field in SECTIONS if callable(field.default_factory)], []
    while pending:
        section = pending.pop()
        if dataclasses.is_dataclass(section):
            found.append(section)
            pending += [type(getattr(section(), field.name)) for field in dataclasses.fields(section)]
    return found


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_key_has_a_help(section):
    keys = [
        field.name
        for field in dataclasses.fields(section)
        if not dataclasses.is_dataclass(getattr(section(), field.name))
    ]
    assert [key for key in keys if not field_help(section).get(key)] == []


def test_the_sections_are_those_of_the_documentation():
    assert [field.name for field in SECTIONS][:4] == ["run", "model", "data", "optimizer"]
    assert len(sections()) > 10


def test_where_a_config_comes_from_does_not_make_it_another():
    elsewhere = Config(source=Path("elsewhere.yaml"))
    assert elsewhere == Config()
    assert "elsewhere" not in repr(elsewhere)


def test_what_a_run_allows_is_names_of_modules():
    assert RunConfig(allow=("my_package.models", "optax")).allow == ("my_package.models", "optax")
    with pytest.raises(UserError) as caught:
        RunConfig(seed=2**32, allow=("my-package", "a..b"))
    seed, *others = str(caught.value).splitlines()
    assert seed.startswith("run.seed=4294967296")
    assert others == [
        f"run.allow: {name!r} is no name of a module or package, such as my_package." for name in ("my-package", "a..b")
    ]


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ("gs://bucket/programs", "set the variable JAX_COMPILATION_CACHE_DIR=gs://bucket/programs"),
        ("  ", "run.cache: '  ' is blank; write a folder, none, or leave the key out"),
    ],
)
def test_what_is_no_folder_of_programs(cache, says):
    with pytest.raises(UserError, match=says):
        RunConfig(cache=cache)
