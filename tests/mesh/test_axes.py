"""Physical order: fast axes inside a host, the first axes across hosts."""

import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from spmdkit.mesh import DeviceMesh
from spmdkit.mesh.axes import axes_across, divisors, physical_order


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


def test_finds_axes_across_groups():
    assert axes_across(np.array([[0, 0], [0, 1]]), ("data", "tensor")) == ("data", "tensor")
    assert DeviceMesh.of(data=8).axes_across_processes == ()


@pytest.mark.parametrize("number", [1, 2, 3, 12, 36, 97, 5040])
def test_divisors(number):
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
