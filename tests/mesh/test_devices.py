"""Devices by name."""

import jax
import pytest
import spmdkit.mesh.devices as devices
from spmdkit.mesh import get_device_count, list_devices


def test_lists_all_devices():
    assert list_devices() == [f"cpu:{number}" for number in range(8)]
    assert list_devices("CPU") == list_devices()  # in any case


def test_counts_devices():
    assert get_device_count() == get_device_count("cpu") == 8


@pytest.mark.parametrize("function", [list_devices, get_device_count])
def test_says_what_there_is(function):
    with pytest.raises(ValueError, match="device_type='TPU': JAX has no such devices here; it sees cpu:0"):
        function("TPU")


def test_finds_devices_by_name():
    assert devices.find_devices(["cpu:3", "CPU:0"]) == [jax.devices()[3], jax.devices()[0]]


def test_cuda_is_a_gpu(monkeypatch):
    card = type("Card", (), {"platform": "gpu", "id": 1})()
    monkeypatch.setattr(jax, "devices", lambda platform=None: [card])
    assert devices.find_devices(["cuda:1"]) == devices.find_devices(["rocm:1"]) == [card]
