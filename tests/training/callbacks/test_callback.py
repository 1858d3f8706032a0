from spmdkit.training.callbacks.callback import EVENTS, Callback, Requests, Run, implements


class Mine(Callback):
    def on_train_end(self, run): ...


class Plain:
    def on_step_begin(self, run): ...


def test_finds_own_methods():
    assert [name for name in EVENTS if implements(Mine(), name)] == ["on_train_end"]
    assert [name for name in EVENTS if implements(Plain(), name)] == ["on_step_begin"]
    assert not any(implements(Callback(), name) for name in EVENTS)


def test_combines_requests_and_keeps_the_first_end():
    both = Requests(end="interrupted", reason="a file", evaluate=True, factor=0.5) | Requests(
        end="finished", reason="enough", save=True, factor=0.5
    )
    assert both == Requests(end="interrupted", reason="a file", evaluate=True, save=True, factor=0.25)


def test_requests_survive_as_text():
    parts = [Requests(save=True, factor=0.1, parts={"body": 0.5, "head": 1.0}), Requests(parts={"body": 0.0})]
    requests = [*parts, Requests(end="finished", reason='it is "done"')]
    assert Requests.read(each.text() for each in requests) == requests[0] | requests[1] | requests[2]
    assert Requests.read(each.text() for each in parts).parts == {"body": 0.0, "head": 1.0}
    assert parts[1], "a factor of 0 is a request"


def test_each_callback_keeps_its_own_checkpoints(tmp_path):
    run, best, milestones = Run(folder=tmp_path, start=0, num_steps=9), object(), object()
    run.keep(best, {2})
    run.keep(milestones, {5})
    run.keep(best, {4})
    assert run.kept == {4, 5}
