"""Whose a module is, and how it gets its options; what is told of wrong ones is in test_mistakes.py."""

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.adapters.libraries import (
    groups_of,
    library_of,
    library_of_class,
    made_with,
    makes_modules,
    own_name,
)
from support import forms_of_names


def test_whose_a_module_is_is_seen_without_importing_the_others():
    assert library_of(lambda rngs: None) == "flax.nnx"
    assert library_of(lambda key, width=3: None) == "equinox"
    assert library_of(lambda key: None, makers=False) is None
    assert library_of(object()) is None
    assert library_of(print) is None


def test_options_reach_what_makes_a_module():
    made = made_with(lambda rngs, width: (rngs, width), {"width": 3}, {})
    assert made(rngs=1) == (1, 3)
    assert made_with(lambda key, depth: (key, depth), {"depth": 2}, {})(key=0) == (0, 2)


def test_the_library_of_a_class():
    names = ("NNXClass", "EquinoxClass", "LinenClass", "OwnClass")
    found = [library_of_class(getattr(forms_of_names, name)) for name in names]
    assert found == ["flax.nnx", "equinox", "flax.linen", None]
    assert library_of_class(forms_of_names.LinenClass(3)) is None


def test_what_can_only_make_modules():
    assert makes_modules(forms_of_names.LinenClass, {})
    assert makes_modules(forms_of_names.nnx_maker, {})
    assert not makes_modules(lambda key=None: None, {})
    assert not makes_modules(lambda key: None, {"key": 3})
    assert not makes_modules(forms_of_names.own_function, {})


def test_a_key_is_an_argument_of_equinox_alone():
    """A class of NNX may have an option of that name."""

    class Keyed(forms_of_names.NNXClass):
        def __init__(self, key, rngs):
            super().__init__(key, rngs=rngs)

    made = made_with(Keyed, {"key": 3}, {})
    assert library_of(made) == "flax.nnx"
    with pytest.raises(UserError, match=r"model\.key is required"):
        made_with(Keyed, {}, {})


@pytest.mark.parametrize(
    ("library", "param", "state"),
    [
        ("flax.linen", "params/Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
        ("flax.nnx", "Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
        ("equinox", "Dense_0/kernel", "state/batch_stats/BatchNorm_0/mean"),
        ("keras", "Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
        ("", "Dense_0/kernel", None),
    ],
)
def test_names(library, param, state):
    assert own_name(library, "params/Dense_0/kernel") == param
    assert ("model_state" in groups_of(library)) == (state is not None)
    if state:
        assert own_name(library, "model_state/batch_stats/BatchNorm_0/mean") == state
