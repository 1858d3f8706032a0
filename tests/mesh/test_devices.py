"""Devices by name."""

import os
import subprocess
import sys

import jax
import pytest
import spmdkit.mesh.devices as devices
from spmdkit.mesh import DeviceMesh, UserError, backend_started, get_device_count, list_devices, simulate


def test_lists_and_finds_devices():
    assert list_devices() == list_devices("CPU") == [f"cpu:{number}" for number in range(8)]
    assert get_device_count() == get_device_count("cpu") == 8
    assert devices.find_devices(["cpu:3", "CPU:0"]) == [jax.devices()[3], jax.devices()[0]]
    with pytest.raises(ValueError, match="device_type='TPU': unknown device type; JAX sees cpu:0"):
        list_devices("TPU")


def test_cuda_means_gpu(monkeypatch):
    card = type("Card", (), {"platform": "gpu", "id": 1})()
    monkeypatch.setattr(jax, "devices", lambda platform=None: [card])
    assert devices.find_devices(["cuda:1"]) == devices.find_devices(["rocm:1"]) == [card]


BEFORE = """
import os
from spmdkit.mesh import DeviceMesh, backend_started
mesh = DeviceMesh.simulated(3)
assert not backend_started()
assert os.environ["XLA_FLAGS"].endswith("--xla_cpu_enable_concurrency_optimized_scheduler=false")
small = DeviceMesh.simulated(2)                  # does not take devices away again
assert mesh.backend_mesh.size == 3 and small.backend_mesh.size == 2
import jax
assert backend_started() and jax.device_count() == 3
assert float(jax.numpy.ones(3).sum()) == 3       # the flag is known to this XLA
try:
    DeviceMesh.simulated(4)
except RuntimeError as error:
    print(error)
"""


def run_python(code: str, **environment: str) -> str:
    """Runs code in a new process without this one's JAX settings; returns its output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "SPMDKIT_"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


KEEPS = 'import os, spmdkit.mesh; spmdkit.mesh.simulate(2); print(os.environ["XLA_FLAGS"])'


@pytest.mark.slow
def test_simulates_before_and_rejects_after_jax_starts():
    output = run_python(BEFORE)
    assert "simulate(4) is too late: JAX has already opened its devices, and this process has 3 CPU devices" in output
    assert "(3 < 4)" in output
    assert "set run.simulate" in output
    assert "JAX_NUM_CPU_DEVICES=4" in output


@pytest.mark.slow
def test_keeps_xla_flags_of_the_user():
    given = "--xla_cpu_enable_concurrency_optimized_scheduler=true"
    assert run_python(KEEPS, XLA_FLAGS=given).strip() == given


@pytest.mark.parametrize(("asked", "opened"), [(2, 8), (9, 9)])
def test_keeps_devices_that_were_asked_for_before(asked, opened, monkeypatch):
    settings = {}
    monkeypatch.setenv("XLA_FLAGS", devices.SCHEDULER_FLAG)
    monkeypatch.setattr(devices, "backend_started", lambda: False)
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    simulate(asked)
    assert settings == {"jax_platforms": "cpu", "jax_num_cpu_devices": opened}


def test_accepts_fewer_devices_than_open_ones():
    assert backend_started()
    assert jax.device_count() == 8
    simulate(8)
    assert DeviceMesh.simulated(4).devices.flatten().tolist() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert DeviceMesh.simulated(8, data=2, fsdp=-1).axis_size("fsdp") == 4
    with pytest.raises(RuntimeError, match=r"simulate\(9\) is too late") as info:
        DeviceMesh.simulated(9)
    assert isinstance(info.value, UserError)  # on the command line a mistake (2), not an error of ours
