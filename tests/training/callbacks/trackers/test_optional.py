"""Libraries that come with an extra."""

import sys

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.trackers.optional import needs


def test_what_is_installed_is_not_imported():
    unused = next(name for name in ("wave", "mailbox", "tabnanny") if name not in sys.modules)
    needs(unused, "extra")
    assert unused not in sys.modules


def test_what_is_not_installed_names_its_extra():
    with pytest.raises(UserError) as caught:
        needs("no_such_library", "tensorboard")
    assert str(caught.value) == (
        "no_such_library is not installed. Install it with: pip install 'spmdkit[tensorboard]'."
    )
