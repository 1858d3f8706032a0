"""A program that compiles again is told with what changed; what else compiles does not count."""

import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.parallel.step.recompilation import RecompilationWatch
from support import toy


@pytest.fixture
def watch():
    """(function, arguments) -> runs it under a watch."""
    watched = RecompilationWatch("the step")

    def call(function, *arguments):
        before = watched.compilations
        function(*arguments)
        watched.check(before, *arguments)

    return call


def fresh(scale):
    """A program that nothing has compiled yet."""
    return jax.jit(lambda batch: jax.tree.map(lambda leaf: leaf * scale, batch))


def test_the_first_call_and_calls_that_compile_nothing_are_silent(watch):
    program = fresh(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            watch(program, {"x": jnp.ones(3)})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.ones(4), "y": jnp.ones(2)}, r"0/x: float32\[3\] -> float32\[4\]\. Keep"),
        ({"x": jnp.ones(3, jnp.int32), "y": jnp.ones(2)}, r"0/x: float32\[3\] -> int32\[3\]\. Keep"),
        ({"x": jnp.ones(3)}, r"0/y: float32\[2\] -> absent"),
    ],
    ids=["shape", "dtype", "absent"],
)
def test_reports_changed_arguments(watch, changed, text):
    program = fresh(3)
    watch(program, {"x": jnp.ones(3), "y": jnp.ones(2)})
    with pytest.warns(RuntimeWarning, match=f"the step was compiled again, which costs as much.*{text}"):
        watch(program, changed)


def test_reports_changed_shardings(watch):
    mesh, program = toy.mesh(data=2).backend_mesh, fresh(4)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    watch(program, jax.device_put(jnp.ones(4), whole))
    with pytest.warns(RuntimeWarning, match=r"P\(\) -> float32\[4\] P\('data',\)|PartitionSpec\(\) -> "):
        watch(program, jax.device_put(jnp.ones(4), split))


def test_reports_unchanged_arguments(watch):
    watch(fresh(5), jnp.ones(3))
    with pytest.warns(RuntimeWarning, match="no argument changed shape, dtype or sharding"):
        watch(fresh(6), jnp.ones(3))


def test_ignores_compilations_of_other_threads(watch):
    program = fresh(7)
    watch(program, jnp.ones(3))

    def beside(x):
        thread = threading.Thread(target=lambda: fresh(8)(jnp.ones(9)))
        thread.start()
        thread.join()
        return program(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch(beside, jnp.ones(3))
