"""How a module is told whether it is trained: by whichever argument it has."""

from spmdkit.models.adapters.mode import mode_arguments


def test_arguments_that_say_opposite_things():
    def call(x, training=False, deterministic=True, use_running_average=None, rate=0.5):
        return x

    assert mode_arguments(call, True) == {"training": True, "deterministic": False, "use_running_average": False}
    assert mode_arguments(call, False) == {"training": False, "deterministic": True, "use_running_average": True}


def test_none_where_there_is_none():
    assert mode_arguments(lambda x: x, True) == {}
    assert mode_arguments(print, True) == {}
    assert mode_arguments(dict.fromkeys, True) == {}, "a function without a signature"
