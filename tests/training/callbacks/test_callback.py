from spmdkit.training.callbacks.callback import EVENTS, Callback, hears


class Mine(Callback):
    def on_train_end(self, run): ...


class Plain:
    def on_step_begin(self, run): ...


def test_only_what_is_its_own_is_heard():
    assert [name for name in EVENTS if hears(Mine(), name)] == ["on_train_end"]
    assert [name for name in EVENTS if hears(Plain(), name)] == ["on_step_begin"]
    assert not any(hears(Callback(), name) for name in EVENTS)


def test_the_base_class_does_nothing():
    callback = Callback()
    assert (callback.state(), callback.finished()) == ({}, "")
    for name in EVENTS:
        arguments = (None,) * (callback_arguments(name))
        assert getattr(callback, name)(*arguments) is None


def callback_arguments(name: str) -> int:
    return getattr(Callback, name).__code__.co_argcount - 1
