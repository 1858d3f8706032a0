"""Warnings of a command are one line each, without a path of the environment."""

import warnings

import flax
import numpy
import pytest
from spmdkit.launch.plain_warnings import one_line, plain_warnings
from spmdkit.layouts import table
from spmdkit.parallel.step.manual_axes import UncheckedStep


class OwnKind(UserWarning):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("category", "file", "whose"),
    [
        (UncheckedStep, flax.__file__, ""),  # whoever called what warned
        (UserWarning, table.__file__, ""),
        (RuntimeWarning, table.__file__, ""),
        (UserWarning, flax.__file__, " (of flax)"),
        (RuntimeWarning, numpy.__file__, " (RuntimeWarning of numpy)"),
        (UserWarning, "/mine/net.py", " (of /mine/net.py, line 3)"),
        (OwnKind, "/mine/net.py", " (OwnKind of /mine/net.py, line 3)"),
    ],
)
def test_a_line_says_what_and_whose(category, file, whose):
    assert one_line("two\n  lines", category, file, 3, "x = 1") == f"warning: two lines{whose}\n"


def test_control_characters_are_escaped():
    assert one_line("\x1b[2J", UserWarning, table.__file__, 3) == "warning: \\x1b[2J\n"


def test_inside_the_block_alone():
    told = "mind", UncheckedStep, table.__file__, 3
    with plain_warnings():
        assert warnings.formatwarning(*told) == "warning: mind\n"
    assert warnings.formatwarning(*told).startswith(f"{table.__file__}:3: UncheckedStep: mind")
