"""DeviceMesh: shapes, names, devices, equality, JAX meshes."""

import random
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from spmdkit.mesh import AXES, DeviceMesh, list_devices
from spmdkit.mesh.axes import axes_across, physical_order

TARGETS = [f"cuda:{number}" for number in range(16)]


def test_keeps_its_arguments():
    mesh = DeviceMesh((4, 2), ["batch", "model"], [f"CPU:{number}" for number in range(8)])
    assert (mesh.shape, mesh.size) == ((4, 2), 8)
    assert mesh.axis_names == ["batch", "model"]  # a list stays a list
    assert mesh.devices[1, 0] == "CPU:2"  # row by row
    with pytest.raises(ValueError, match="read-only"):
        mesh.devices[0, 0] = "CPU:1"
    assert DeviceMesh((2, 4), ("data", "model")).devices.flatten().tolist() == list_devices()


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 4), ("data",), r"must have one entry for each axis, got shape=\(2, 4\) and axis_names=\('data',\)"),
        ((8,), "data", "must have one entry for each axis, got .* and axis_names='data'"),
        (8, ("data",), "must have one entry for each axis, got shape=8"),
        ((2, 2), ("data", "model"), "Shape does not match the number of devices. .*2 x 2 = 4, not 8"),
        ((3, -1), ("data", "model"), "8 % 3 = 2, so -1 is not an integer"),
        ((-1, -1), ("data", "model"), "or one -1 for the remaining devices, got data=-1, model=-1"),
        ((0, 8), ("data", "model"), "integers of at least 1, or one -1 for the remaining devices, got data=0"),
        ((2.0, 4), ("data", "model"), "integers.*data=2.0"),
        ((2, 4), ("data", "data"), r"must be different non-empty strings, .* got \('data', 'data'\)"),
        ((8,), (None,), "must be different non-empty strings"),
    ],
)
def test_rejects_shapes_and_names(shape, names, message):
    with pytest.raises(ValueError, match=message):
        DeviceMesh(shape, names)


def test_rejects_a_device_twice():
    with pytest.raises(ValueError, match=r"\['cpu:0'\] more than once"):
        DeviceMesh((2,), ("data",), ["cpu:0", "cpu:0"])


@pytest.mark.parametrize(
    ("sizes", "proposals"),
    [
        ({"data": 3, "fsdp": 4}, ["data=2, fsdp=4"]),
        ({"data": 2, "fsdp": 8}, ["fsdp=8", "data=2, fsdp=4"]),
        ({"data": 2, "fsdp": 2}, ["data=4, fsdp=2", "data=2, fsdp=4"]),
        ({"data": 3, "tensor": 5}, []),
        ({"data": 16}, ["data=8"]),
    ],
)
def test_proposes_sizes_that_fit(sizes, proposals):
    with pytest.raises(ValueError, match="Choose sizes with the product 8") as error:
        DeviceMesh.of(TARGETS[:8], **sizes)
    assert re.findall("for example (.+?);", str(error.value)) == proposals


def test_proposes_to_simulate_missing_devices_only():
    with pytest.raises(
        ValueError, match=r"2 x 4 = 8, not 1\. .*begin the program with spmdkit.DeviceMesh.simulated\(8, "
    ):
        DeviceMesh((2, 4), ("data", "fsdp"), ["cpu:0"])
    with pytest.raises(ValueError, match="2 x 2 = 4, not 8") as error:
        DeviceMesh((2, 2), ("data", "fsdp"), TARGETS[:8])
    assert "simulate" not in str(error.value)


def test_resolves_one_remaining_size():
    assert DeviceMesh((2, -1), ("data", "model")).shape == (2, 4)
    assert DeviceMesh.of(fsdp=-1, tensor=2).axis_size("fsdp") == 4
    assert DeviceMesh.of(data=-1, fsdp=8).axis_size("data") == 1


def test_of_has_all_axes_slowest_first():
    mesh = DeviceMesh.of(tensor=2, data=4)
    assert mesh.axis_names == AXES
    assert mesh.shape == (1, 4, 1, 1, 1, 2)
    assert mesh.devices[0, 1, 0, 0, 0].tolist() == ["cpu:2", "cpu:3"]
    assert DeviceMesh.of(jax.devices()[1::-1], data=2).devices.flatten().tolist() == ["cpu:1", "cpu:0"]
    with pytest.raises(ValueError, match=r"Unknown mesh axis 'fdsp'.*Did you mean 'fsdp'"):
        DeviceMesh.of(fdsp=8)


def test_axis_size():
    mesh = DeviceMesh((2, 4), ("replica", "model"))
    assert (mesh.axis_size("model"), mesh.axis_size("tensor")) == (4, 1)  # canonical axes always exist
    with pytest.raises(ValueError, match=r"Unknown mesh axis 'modle'.*Did you mean 'model'"):
        mesh.axis_size("modle")


def test_equal_meshes_have_one_hash():
    one, same = DeviceMesh((2, 4), ["data", "model"]), DeviceMesh((2, -1), ("data", "model"), list_devices())
    assert one == same
    assert len({one, same}) == 1
    others = [
        DeviceMesh((4, 2), ("data", "model")),
        DeviceMesh((2, 4), ("data", "fsdp")),
        DeviceMesh((2, 4), ("data", "model"), list_devices()[::-1]),
    ]
    assert all(one != other for other in others)
    assert one != "mesh"


def test_backend_mesh_is_auto_and_cached():
    mesh = DeviceMesh.of(data=2, fsdp=4)
    assert mesh.backend_mesh is mesh.backend_mesh
    assert mesh.backend_mesh.axis_names == AXES
    assert set(mesh.backend_mesh.axis_types) == set(mesh.abstract_mesh.axis_types) == {AxisType.Auto}
    assert [device.id for device in mesh.backend_mesh.devices.flat] == list(range(8))
    assert dict(mesh.abstract_mesh.shape) == dict(mesh.backend_mesh.shape)


def test_a_subset_of_the_devices_computes():
    mesh = DeviceMesh.simulated(2)
    array = jax.device_put(np.arange(4.0), NamedSharding(mesh.backend_mesh, PartitionSpec("data")))
    assert {device.id for device in array.sharding.device_set} == {0, 1}
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(array), [1, 2, 3, 4])


def test_accepts_devices_of_other_machines():
    mesh = DeviceMesh.of(TARGETS, data=-1, tensor=8)
    assert mesh.axis_size("data") == 2
    assert mesh.abstract_mesh.size == 16
    assert "16 devices, cuda" in str(mesh)
    assert hash(mesh) == hash(DeviceMesh.of(TARGETS, data=2, tensor=8))
    with pytest.raises(ValueError, match=r"16 of the mesh's 16 devices are not on this machine: cuda:0.*JAX sees 8"):
        _ = mesh.backend_mesh


EIGHT = """\
data=2, fsdp=4: 8 devices, cpu
          fsdp 0  fsdp 1  fsdp 2  fsdp 3
  data 0  cpu:0   cpu:1   cpu:2   cpu:3
  data 1  cpu:4   cpu:5   cpu:6   cpu:7"""


def test_draws_few_devices(monkeypatch):
    mesh = DeviceMesh.of(data=2, fsdp=4)
    assert str(mesh) == EIGHT
    assert repr(mesh) == "DeviceMesh(data=2, fsdp=4; 8 devices)"
    lines = str(DeviceMesh((4,), ("batch",), TARGETS[:4])).splitlines()
    assert lines[1:] == ["  batch 0  batch 1  batch 2  batch 3", "  cuda:0   cuda:1   cuda:2   cuda:3"]
    assert str(DeviceMesh.of(["cuda:0"])).splitlines()[1:] == ["  tensor 0", "  cuda:0"]
    lines = str(DeviceMesh.of(TARGETS[:8], data=2, fsdp=2, tensor=2)).splitlines()
    assert lines[1].split() == ["tensor", "0", "tensor", "1"]
    assert lines[3].split() == ["data", "0", "fsdp", "1", "cuda:2", "cuda:3"]
    assert len(lines) == 6
    monkeypatch.setattr(DeviceMesh, "axes_across_processes", ("data",))
    assert str(DeviceMesh.of(data=2, fsdp=4)) == EIGHT + "\n  crosses processes: data"


def test_draws_a_thousand_devices_on_one_screen():
    lines = str(DeviceMesh.of([f"cuda:{number}" for number in range(1024)], data=32, fsdp=32)).splitlines()
    assert lines[0] == "data=32, fsdp=32: 1,024 devices, cuda"
    assert len(lines) == 18
    assert max(map(len, lines)) <= 100
    assert lines[-1].split() == ["data", "31", *(f"cuda:{992 + n}" for n in range(6)), "...", "cuda:1023"]
    assert set(lines[-2].split()) == {"..."}


def hosts(num_hosts: int, per_host: int) -> list:
    """Devices of several hosts in a random order; ids as JAX gives them on CPU."""
    found = [
        SimpleNamespace(process_index=host, id=2048 * host + local, platform="cpu")
        for host in range(num_hosts)
        for local in range(per_host)
    ]
    random.Random(0).shuffle(found)
    return found


@pytest.mark.parametrize(
    ("devices", "order"),
    [
        (hosts(2, 3), [0, 1, 2, 2048, 2049, 2050]),
        ([SimpleNamespace(process_index=id % 2, id=id) for id in range(8)], [0, 2, 4, 6, 1, 3, 5, 7]),
        ([SimpleNamespace(process_index=1 - id // 4, id=id) for id in range(8)], [4, 5, 6, 7, 0, 1, 2, 3]),
        ([SimpleNamespace(process_index=p, id=p, slice_index=1 - p % 2) for p in range(4)], [1, 3, 0, 2]),
    ],
    ids=["by process, then id", "interleaved ids", "descending ids", "slices first"],
)
def test_orders_devices(devices, order):
    assert [device.id for device in physical_order(devices)] == order


@pytest.mark.parametrize(
    ("num_hosts", "per_host", "sizes", "across"),
    [
        (2, 4, {"data": 2, "fsdp": 4}, ("data",)),
        (2, 4, {"data": 4, "tensor": 2}, ("data",)),
        (4, 2, {"pipe": 2, "data": 2, "tensor": 2}, ("pipe", "data")),
        (2, 4, {"fsdp": 8}, ("fsdp",)),  # no way around it
        (1, 8, {"data": 2, "fsdp": 4}, ()),
    ],
)
def test_fast_axes_stay_inside_a_host(monkeypatch, num_hosts, per_host, sizes, across):
    devices = hosts(num_hosts, per_host)
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices)
    mesh = DeviceMesh.of(**sizes)
    process_of = {f"cpu:{device.id}": device.process_index for device in devices}
    processes = np.vectorize(process_of.get)(mesh.devices)
    assert axes_across(processes, mesh.axis_names) == across
