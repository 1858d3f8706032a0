"""Resizing the mesh for the available devices: a table of the rule, and the messages of invalid configs."""

import pytest
from spmdkit.configs import ConfigError, load_config
from spmdkit.configs.elastic import fit_to_devices, refit
from support.runs import write_config


def divides(rows):
    """Returns a check that data and fsdp of a mesh divide some rows."""
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
    ({"data": 1, "fsdp": 5}, BOTH, 12, 1, 24, {"data": 2, "fsdp": 6}),  # the ratio 6 : 5 is nearer to 1 than 5 : 4
]


@pytest.mark.parametrize(("sizes", "elastic", "devices", "processes", "rows", "expected"), TABLE)
def test_refits_sizes_by_the_rule(sizes, elastic, devices, processes, rows, expected):
    assert refit(sizes, elastic, devices, divides(rows), multiple=processes) == expected


def config(folder, *overrides, **sections):
    return load_config(write_config(folder, **sections), overrides)


def elastic(folder, *overrides, axes="[data, fsdp]"):
    return config(folder, f"launch.elastic={axes}", *overrides)


def sizes_of(config):
    return {axis: options.size for axis, options in config.strategy.items()}


def test_resizing_changes_only_the_sizes(tmp_path):
    given = elastic(tmp_path)
    fitted = fit_to_devices(given, 4, 2)
    assert sizes_of(fitted.config) == {"fsdp": 4, "data": 1}
    assert fitted.config.strategy["fsdp"].floor_bytes == 256
    assert (fitted.config.train, fitted.devices) == (given.train, 4)
    assert fitted.summary == (
        "Resized the mesh for 4 devices (launch.elastic): data 1 instead of 2. The global batch and the order of the "
        "data stay the same."
    )
    assert fit_to_devices(given, 8).summary == ""
    assert sizes_of(fit_to_devices(elastic(tmp_path, axes="[data, fsdp, data]"), 4, 2).config) == sizes_of(
        fitted.config
    )
    assert "; 2 of them stay idle because no mesh fits all" in fit_to_devices(given, 6).summary


def test_keeps_the_mesh_of_other_configs(tmp_path):
    given = config(tmp_path)
    assert fit_to_devices(given, 3) == (given, 3, "")


def test_loads_a_file_for_another_number_of_devices(tmp_path):
    path = write_config(tmp_path, launch={"elastic": ["data", "fsdp"]})
    loaded = load_config(path, num_processes=2, simulate=2)
    assert sizes_of(loaded) == {"fsdp": 4, "data": 2}, "config.yaml keeps what was configured"
    with pytest.raises(ConfigError, match=r"no mesh fits 6 devices in 3 processes\. .* of data x fsdp x train"):
        load_config(path, num_processes=3, simulate=2)
    with pytest.raises(ConfigError, match="8 != 6"):
        load_config(write_config(tmp_path), num_processes=3, simulate=2)


@pytest.mark.parametrize(
    ("overrides", "axes", "said"),
    [
        ((), "[dp]", "'dp' cannot be resized; only data and fsdp can, because other axes split the model."),
        ((), "[tensor]", "'tensor' cannot be resized; only data and fsdp can"),
        (("strategy={fsdp: 8}",), "[data]", "data is not an axis of strategy. Set strategy.data=1"),
        (("strategy.data.local_steps=2",), "[data]", "each group along data trains its own copy"),
        (("strategy.data.compress=int8",), "[fsdp]", "its own rounding errors between steps"),
        (
            ("run.simulate=2",),
            "[data]",
            "no mesh fits 2 devices in 1 process. The number of used devices must be a multiple of 4 (fsdp",
        ),
    ],
)
def test_rejects_invalid_axes(tmp_path, overrides, axes, said):
    with pytest.raises(ConfigError) as refused:
        elastic(tmp_path, *overrides, axes=axes)
    assert said in str(refused.value)
    assert "launch.elastic" in str(refused.value)
