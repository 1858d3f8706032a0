"""Simulated devices before and after JAX opens its devices, and imports that open none."""

import jax
import pytest
from spmdkit.mesh import DeviceMesh, UserError, backend_started, simulate

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

IMPORT = """
import importlib, pkgutil, spmdkit
for package in ("mesh", "layouts", "parallel", "models", "data", "training", "configs", "launch"):
    path = importlib.import_module("spmdkit." + package).__path__
    for module in pkgutil.walk_packages(path, f"spmdkit.{package}."):
        importlib.import_module(module.name)
import jax
assert not spmdkit.mesh.backend_started()
jax.config.update("jax_num_cpu_devices", 2)
print(jax.device_count())
"""

KEEPS = """
import os
from spmdkit.mesh import simulate
simulate(2)
print(os.environ["XLA_FLAGS"])
"""


def test_before_and_too_late(run_python):
    output = run_python(BEFORE)
    assert "simulate(4) is too late: JAX has already opened its devices, and this process has 3 CPU devices" in output
    assert "(3 < 4)" in output
    assert "set run.simulate" in output
    assert "JAX_NUM_CPU_DEVICES=4" in output


def test_importing_opens_no_device(run_python):
    assert run_python(IMPORT).strip() == "2"


def test_keeps_the_users_flags(run_python):
    given = "--xla_cpu_enable_concurrency_optimized_scheduler=true"
    assert run_python(KEEPS, XLA_FLAGS=given).strip() == given


def test_after_the_devices_are_open():
    assert backend_started()
    assert jax.device_count() == 8
    simulate(8)
    assert DeviceMesh.simulated(4).devices.flatten().tolist() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert DeviceMesh.simulated(8, data=2, fsdp=-1).axis_size("fsdp") == 4
    with pytest.raises(RuntimeError, match=r"simulate\(9\) is too late") as info:
        DeviceMesh.simulated(9)
    assert isinstance(info.value, UserError)  # on the command line a mistake (2), not an error of ours


def test_rejects_no_devices():
    with pytest.raises(ValueError, match="at least 1"):
        simulate(0)
