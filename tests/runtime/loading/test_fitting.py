"""The strategy of a run on other devices than it was trained on."""

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel.sharding.strategies import read_strategy
from spmdkit.runtime.loading.fitting import devices_of, fit_given, fit_own, fitting_rows


def sizes(fitted):
    return {axis: options.size for axis, options in fitted.strategy.items() if options.size > 1}


@pytest.mark.parametrize(
    ("strategy", "devices", "expected"),
    [
        ({"fsdp": 4, "data": 2}, 8, {"fsdp": 4, "data": 2}),
        ({"pipe": 2, "tensor": 2}, 4, {"pipe": 2, "tensor": 2}),  # as many as there were: its own
        ({"fsdp": 4, "data": 2}, 1, {}),
        ({"pipe": 4, "fsdp": 2, "tensor": 2}, 1, {}),
        ({"fsdp": 4, "data": 2}, 16, {"fsdp": 4, "data": 4}),  # data gives way first
        ({"fsdp": 4, "data": 2}, 2, {"fsdp": 2}),
        ({"fsdp": 8}, 16, {"fsdp": 8, "data": 2}),  # an axis that the run did not have
        ({"fsdp": 4}, 6, {"fsdp": 3, "data": 2}),
        ({"pipe": 4, "data": 2}, 4, {"fsdp": 4}),  # stages become shards
        ({"pipe": 2, "fsdp": 2, "data": 2}, 4, {"fsdp": 4}),
        ({"tensor": 4, "data": 2}, 4, {"tensor": 4}),
        ({"tensor": 4, "data": 2}, 6, {"data": 6}),  # never a size that it was not trained with
        ({"tensor": 2, "context": 2, "fsdp": 2}, 2, {"tensor": 2}),
        ({"expert": 4, "data": 2}, 2, {"data": 2}),
        ({"tensor": 8}, 3, {"data": 3}),
    ],
)
def test_the_own_strategy_is_fitted(strategy, devices, expected):
    fitted = fit_own(read_strategy(strategy), strategy, devices)
    assert sizes(fitted) == expected
    assert fitted.devices == devices


def test_a_rest_of_stages_is_what_it_trained_on():
    strategy = read_strategy({"pipe": -1, "data": 2})
    assert sizes(fit_own(strategy, {"pipe": 2, "data": 2}, 8)) == {"fsdp": 2, "data": 4}
    own = fit_own(strategy, {"pipe": 2, "data": 2}, 4)
    assert (sizes(own), own.as_given) == ({"pipe": 2, "data": 2}, True)
    assert not fit_own(read_strategy({"fsdp": -1}), {"fsdp": 4}, 8).as_given


def test_options_stay_but_those_of_training():
    strategy = {"data": {"size": 2, "zero": 2}, "fsdp": {"size": 4, "floor_bytes": 64}}
    fitted = fit_own(read_strategy(strategy), {"data": 2, "fsdp": 4}, 4)
    assert fitted.strategy["fsdp"].floor_bytes == 64
    assert fitted.strategy["data"].zero == 0
    alone = fit_own(read_strategy({"data": {"size": 2, "local_steps": 4}}), {"data": 2}, 2).strategy["data"]
    assert (alone.size, alone.local_steps) == (2, 0)


def test_as_many_devices_of_each_process():
    assert fit_own(read_strategy({"fsdp": 4}), {"fsdp": 4}, 6, 3).devices == 6
    for mesh, given in (({"fsdp": 4}, "fsdp 4"), ({}, "of 1 device")):
        with pytest.raises(UserError, match=f"mesh {given} does not fit 6 devices of 3 processes"):
            fit_given(mesh, 6, 3)


def test_a_mesh_that_is_given_may_leave_devices_idle():
    assert (fit_given({}, 8).devices, fit_given({"fsdp": 2, "data": 2}, 8).devices) == (1, 4)
    rest = fit_given({"fsdp": 2, "data": -1}, 8)
    assert (sizes(rest), rest.devices) == ({"fsdp": 2, "data": 4}, 8)
    assert devices_of({"fsdp": 2, "data": -1}) == 2


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"fsdp": 16}, r"The mesh fsdp 16 does not fit 8 devices of 1 process: the product of its sizes \(16\) must"),
        ({"fsdp": 3, "data": -1}, r"The mesh fsdp 3 x data -1 does not fit 8 devices"),
        ({"fsdp": -1, "data": -1}, r"The mesh fsdp -1 x data -1 does not fit 8 devices.* One size can be -1"),
        ({"fspd": 8}, r"strategy\.fspd: unknown strategy \(did you mean fsdp\?\)"),
        (8, r'mesh=8: give a mapping of mesh axes to sizes, such as \{"fsdp": 8\}'),
    ],
)
def test_a_mesh_that_cannot_be_is_told(mesh, message):
    with pytest.raises(UserError, match=message):
        fit_given(mesh, 8)


@pytest.mark.parametrize(
    ("mesh", "rows", "expected"),
    [({"fsdp": 8}, 16, 16), ({"fsdp": 8}, 12, 16), ({}, 5, 5), ({"pipe": 2, "data": 4}, 16, 32)],
)
def test_rows_are_those_of_the_config_or_the_next_that_can_be_split(mesh, rows, expected):
    assert fitting_rows(rows, fit_given(mesh, 8)) == expected
