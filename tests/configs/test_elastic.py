"""The mesh for the devices there are: a table of the rule, and what is refused with which arithmetic."""

import pytest
from runs import write_config
from spmdkit.configs import ConfigError, load_config
from spmdkit.configs.elastic import fit_to_devices, refit


def divides(rows):
    """A mesh fits where its data and fsdp divide some rows."""
    return lambda sizes: rows % (sizes.get("data", 1) * sizes.get("fsdp", 1)) == 0


BOTH, PLAIN = ("data", "fsdp"), {"data": 2, "fsdp": 4}
TABLE = [
    # configured, elastic, devices, processes, rows -> sizes
    (PLAIN, BOTH, 8, 1, 16, {"data": 2, "fsdp": 4}),
    (PLAIN, BOTH, 4, 1, 16, {"data": 1, "fsdp": 4}),  # data, named first, gives way first
    (PLAIN, ("fsdp", "data"), 4, 1, 16, {"data": 2, "fsdp": 2}),
    (PLAIN, BOTH, 2, 1, 16, {"data": 1, "fsdp": 2}),
    (PLAIN, BOTH, 1, 1, 16, {"data": 1, "fsdp": 1}),
    (PLAIN, BOTH, 16, 1, 16, {"data": 4, "fsdp": 4}),  # and grows first
    (PLAIN, BOTH, 32, 1, 16, {"data": 4, "fsdp": 4}),  # 16 rows are enough for 16 devices
    (PLAIN, BOTH, 6, 1, 24, {"data": 2, "fsdp": 3}),  # 3 is nearer to 4 than 6, 2 or 1 are
    (PLAIN, BOTH, 6, 1, 16, {"data": 1, "fsdp": 4}),  # 16 % 6, 16 % 5: four of the six
    (PLAIN, BOTH, 6, 2, 16, {"data": 1, "fsdp": 4}),  # two of the three in each process
    (PLAIN, BOTH, 6, 3, 16, None),  # 6 or 3: neither divides 16
    (PLAIN, ("data",), 12, 1, 24, {"data": 3, "fsdp": 4}),
    (PLAIN, ("data",), 7, 1, 16, {"data": 1, "fsdp": 4}),
    (PLAIN, ("data",), 3, 1, 16, None),  # fsdp 4 stays
    ({"data": -1, "fsdp": 4}, ("fsdp",), 8, 1, 16, {"data": 2, "fsdp": 4}),  # the rest may change anyway
    ({"data": -1, "fsdp": 4}, ("fsdp",), 2, 1, 16, {"data": 1, "fsdp": 2}),
    ({"pipe": 2, "tensor": 2, "data": 4}, ("data",), 8, 2, 16, {"pipe": 2, "tensor": 2, "data": 2}),
    ({"data": 1, "fsdp": 1}, BOTH, 4, 1, 16, {"data": 4, "fsdp": 1}),
]


@pytest.mark.parametrize(("sizes", "elastic", "devices", "processes", "rows", "expected"), TABLE)
def test_the_rule(sizes, elastic, devices, processes, rows, expected):
    assert refit(sizes, elastic, devices, divides(rows), multiple=processes) == expected


def config(folder, *overrides, **sections):
    return load_config(write_config(folder, **sections), overrides)


def elastic(folder, *overrides, axes="[data, fsdp]"):
    return config(folder, f"launch.elastic={axes}", *overrides)


def sizes_of(config):
    return {axis: options.size for axis, options in config.strategy.items()}


def test_a_config_keeps_everything_but_the_sizes(tmp_path):
    given = elastic(tmp_path)
    fitted = fit_to_devices(given, 4, 2)
    assert sizes_of(fitted.config) == {"fsdp": 4, "data": 1}
    assert fitted.config.strategy["fsdp"].floor_bytes == 256
    assert (fitted.config.train, fitted.devices) == (given.train, 4)
    assert fitted.said == (
        "The mesh is re-formed for 4 devices (launch.elastic): data 1 instead of 2. Global batch and order of the data "
        "stay."
    )
    assert fit_to_devices(given, 8).said == ""
    assert "; 2 of them stay idle, since no mesh fits all" in fit_to_devices(given, 6).said


def test_without_it_nothing_changes(tmp_path):
    given = config(tmp_path)
    assert fit_to_devices(given, 3) == (given, 3, "")


def test_a_file_is_loaded_for_other_numbers_of_devices(tmp_path):
    path = write_config(tmp_path, launch={"elastic": ["data", "fsdp"]})
    loaded = load_config(path, num_processes=2, simulate=2)
    assert sizes_of(loaded) == {"fsdp": 4, "data": 2}, "config.yaml keeps what was configured"
    with pytest.raises(ConfigError, match="split over no mesh"):
        load_config(path, num_processes=3, simulate=2)
    with pytest.raises(ConfigError, match="8 != 6"):
        load_config(write_config(tmp_path), num_processes=3, simulate=2)


@pytest.mark.parametrize(
    ("overrides", "axes", "said"),
    [
        ((), "[dta]", "'dta' cannot change its size: it is no axis of a mesh, and the axes that can change are data"),
        ((), "[dta]", "Did you mean data?"),
        ((), "[dp]", "Did you mean data?"),
        ((), "[x9]", "Write launch.elastic: [data, fsdp]."),
        (("strategy={fsdp: 8}",), "[data]", "data is no axis of strategy. Set strategy.data=1"),
        ((), "[data, data]", "an axis is named twice"),
        (("strategy.data.local_steps=2",), "[data]", "each group along data trains a copy of its own"),
        (("strategy.data.compress=int8",), "[fsdp]", "errors of its own between steps"),
        (("run.simulate=2",), "[data]", "fsdp 4 needs 4 devices, and there are 2 devices in 1 process: 4 > 2"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, overrides, axes, said):
    with pytest.raises(ConfigError) as refused:
        elastic(tmp_path, *overrides, axes=axes)
    assert said in str(refused.value)
    assert "launch.elastic" in str(refused.value)


LANGUAGE = "model={name: transformer, layers: 4, width: 32, heads: 4, mlp_width: 64}"


@pytest.mark.parametrize(
    ("strategy", "axis", "dealt", "arithmetic", "remedy"),
    [
        ("{tensor: 4, data: 2}", "tensor", "heads and widths", "With tensor 4 a run takes a multiple of 4", "[data]."),
        ("{context: 2, fsdp: 4}", "context", "positions", "With context 2 a run takes a multiple of 2", "[fsdp]."),
        (
            "{pipe: 2, tensor: 4}",
            "pipe",
            "layers",
            "2 x tensor 4 a run takes a multiple of 8",
            "[data] and strategy.data=1.",
        ),
        ("{expert: 4, data: 2}", "expert", "experts", "With expert 4 a run takes a multiple of 4", "[data]."),
    ],
)
def test_other_axes_are_refused_with_reason_arithmetic_and_remedy(tmp_path, strategy, axis, dealt, arithmetic, remedy):
    model = ["model.experts=4"] if axis == "expert" else []
    with pytest.raises(ConfigError) as refused:
        elastic(tmp_path, LANGUAGE, *model, "data={source: stdlib}", f"strategy={strategy}", axes=f"[{axis}]")
    said = str(refused.value)
    assert f"launch.elastic=['{axis}']: '{axis}' cannot change its size: {dealt} are dealt out over it" in said
    assert arithmetic in said
    assert f"Write launch.elastic: {remedy}" in said
