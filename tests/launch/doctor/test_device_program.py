"""Known products and sums on every device; a wrong device is one whose function is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.launch.doctor import device_program
from spmdkit.launch.doctor.device_program import MAX_FACTOR, MAX_TERM, SIZE, TERMS, examine, known_numbers, product


@pytest.mark.slow
def test_right_devices_have_no_problems():
    assert examine(jax.devices()) == {f"cpu:{number}": [] for number in range(8)}


def test_one_wrong_number_of_a_product_is_found():
    def multiply(left, right):
        return product(left, right).at[5, 7].add(1.0)

    (name, problems), *others = examine([jax.devices()[3]], multiply=multiply).items()
    assert (name, others) == ("cpu:3", [])
    known = known_numbers(256).matrix[5, 7]
    assert problems == [
        f"a product of 256 x 256 matrices in {dtype}: 1 of 65,536 numbers are wrong, the first at [5, 7]: "
        f"{known + 1:g} instead of {known:g}"
        for dtype in ("float32", "bfloat16")
    ]


def test_a_wrong_sum_is_found():
    problems = examine(jax.devices()[:1], add=lambda terms: terms[1:].sum() - 1)["cpu:0"]
    assert len(problems) == 1
    assert problems[0].startswith("a sum of 4,194,304 numbers in float32: ")


def test_nan_is_wrong():
    problems = examine(jax.devices()[:1], multiply=lambda left, right: product(left, right) * jnp.nan)["cpu:0"]
    assert "65,536 of 65,536 numbers are wrong, the first at [0, 0]: nan instead of" in problems[0]


def test_an_error_of_one_device_does_not_hide_the_others():
    def multiply(left, right):
        raise RuntimeError("illegal memory access")

    assert examine(jax.devices()[:2], multiply=multiply) == {
        f"cpu:{number}": ["RuntimeError: illegal memory access"] for number in (0, 1)
    }


def test_results_are_exact_in_any_order():
    """Every partial sum is an integer below 2**24, exact in float32; every factor is exact in bfloat16."""
    assert SIZE * MAX_FACTOR**2 < 2**24
    assert TERMS * MAX_TERM < 2**24
    known = known_numbers(64)
    np.testing.assert_array_equal(known.matrix, known.left.astype(int) @ known.right.astype(int))
    assert known.total == known.terms.astype(int).sum()
    for factors in (known.left, known.right):
        np.testing.assert_array_equal(factors.astype(jnp.bfloat16).astype(np.float32), factors)


@pytest.mark.slow
def test_the_program_needs_nothing_of_the_package(tmp_path):
    """A child process runs the file alone; arguments choose the devices of a process that shares its host."""
    program = tmp_path / "alone.py"
    program.write_bytes(Path(device_program.__file__).read_bytes())
    environ = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3", "PATH": ""}
    ended = subprocess.run(
        [sys.executable, "-P", program, "1"], env=environ, capture_output=True, text=True, check=True
    )
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result == {"platform": "cpu", "kind": "cpu", "count": 3, "problems": {"cpu:1": []}}
