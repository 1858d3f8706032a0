"""XLA_FLAGS that XLA does not know are told before XLA ends the process."""

import os

import pytest
from spmdkit.launch.compiling.flags import check_flags
from spmdkit.mesh.errors import UserError


def test_no_flags_ask_nobody(tmp_path):
    check_flags({"XLA_FLAGS": " "}, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_looked_into_ends_nothing(tmp_path):
    """The error of a name that is too long takes the same way as that of a home that nobody may enter, root too."""
    check_flags({**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}, tmp_path / ("x" * 300))


@pytest.mark.slow
def test_unknown_flags_are_named_and_known_ones_are_noted(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with pytest.raises(UserError, match=r"does not know --xla_nope=1, and would end the process"):
        check_flags({**environ, "XLA_FLAGS": "--xla_nope=1 --xla_cpu_enable_fast_math=false"}, tmp_path)
    assert not [*tmp_path.iterdir()]
    known = {**environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    check_flags(known, tmp_path)
    (note,) = tmp_path.iterdir()
    assert note.read_text().endswith(" --xla_cpu_enable_fast_math=false")
    check_flags({"XLA_FLAGS": known["XLA_FLAGS"]}, tmp_path)  # no child could start without an environment
