"""Limits of whole numbers: every key of the table is a key that there is, and the axes of users have one too."""

from spmdkit.configs.reading.keys import config_keys
from spmdkit.configs.reading.limits import BYTES, DEVICES, INDEX, LARGEST, largest


def test_every_limit_is_of_a_key_that_there_is():
    """A key that is renamed would lose its limit without a word."""
    known = set(config_keys())
    assert LARGEST.keys() <= known, sorted(LARGEST.keys() - known)


def test_what_has_a_limit_of_its_own():
    assert largest("strategy.fsdp.floor_bytes") == BYTES
    assert largest("launch.slurm.warn_seconds") == 65535


def test_sizes_of_axes_are_numbers_of_devices():
    assert largest("strategy.pipe.size") == 4096
    assert largest("strategy.fsdp.size") == largest("strategy.my_axis.size") == DEVICES
    assert largest("data.size") == INDEX, "no axis"


def test_all_others_fit_into_an_index():
    assert largest("train.steps") == largest("my.key") == INDEX
