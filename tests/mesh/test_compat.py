"""The table of known faults of jaxlib, and the library's own programs, which do not contain their patterns."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from spmdkit.mesh.compat import KNOWN_FAULTS, carried_by_scan, jax_option, known_faults
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.models.moe import MoEConfig, moe
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import build_step, lay_out

ROWS = 40_000
"""Rows, or positions, of one device."""
REPORT = "https://github.com/jax-ml/jax/issues/39103"
DOT = re.compile(r" dot\(%?([\w.-]+), .*lhs_contracting_dims=\{([\d,]+)\}")
REDUCE = re.compile(r" reduce\(%?([\w.-]+), .*dimensions=\{([\d,]+)\}")
DECLARED = re.compile(r"%?([\w.-]+)(?: =|:) \w+\[([\d,]*)\]")


@pytest.fixture
def user_compilation():
    """Compiles as for a user: the tests' own settings leave most optimizations out."""
    with jax_option("jax_disable_most_optimizations", False):
        yield


def reduced_products(compiled_text):
    """Returns the fused computations with the pattern: a product over a dim of 3, reduced over its first dims."""
    found = []
    for computation in compiled_text.split("\n\n"):
        shapes = {name: dims.split(",") for name, dims in DECLARED.findall(computation)}
        products = [shapes[name][int(dim)] for name, dims in DOT.findall(computation) for dim in dims.split(",")]
        reduces_first = any(
            str(len(shapes[name]) - 1) not in dims.split(",") for name, dims in REDUCE.findall(computation)
        )
        if "3" in products and reduces_first:
            found.append(computation)
    return found


def squares(rows, matrix):
    return jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)


@pytest.mark.usefixtures("user_compilation", "float64")
@pytest.mark.parametrize(("dtype", "rows"), [("float64", 16_385), ("float32", 32_769)])
def test_the_table_states_if_this_jaxlib_is_wrong(dtype, rows):
    """A new version that is wrong too has to be added."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(3, 3)).astype(dtype)
    inputs = random.normal(size=(rows, 3)).astype(dtype)
    expected = ((inputs.astype(np.float64) @ matrix.T.astype(np.float64)) ** 2).sum(axis=1)
    is_wrong = not np.allclose(squares(inputs, matrix), expected, rtol=1e-3)
    assert is_wrong == any(fault.url == REPORT for fault in known_faults("cpu"))


def test_faults_are_those_of_a_platform_and_a_version():
    assert [fault.url for fault in known_faults("cpu", "0.10.2")] == [REPORT]
    assert known_faults("gpu", "0.10.2") == known_faults("cpu", "0.10.1") == known_faults("cpu", "0.12.0.1") == []
    described = KNOWN_FAULTS[0].describe("0.10.2")
    assert described.startswith("jaxlib 0.10.2 on cpu: jitted `vmap(lambda row: reduce(matrix @ row))` is wrong")
    assert described.endswith(f"({REPORT})")


@pytest.mark.usefixtures("user_compilation")
@pytest.mark.skipif(not known_faults("cpu"), reason="this jaxlib computes the pattern correctly")
def test_the_pattern_is_found_in_a_compiled_program():
    abstract = jax.ShapeDtypeStruct((ROWS, 3), np.float32)
    text = jax.jit(lambda rows: squares(rows, np.eye(3, dtype=np.float32))).lower(abstract).compile().as_text()
    assert len(reduced_products(text)) == 1


def abstract_rows(**shapes):
    dtypes = {"inputs": np.int32, "targets": np.int32, "weights": np.float32, "example": np.int32}
    return {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items()}


SIZES = {"vocabulary": 3, "length": 16, "layers": 1, "width": 6, "heads": 3, "head_width": 2, "mlp_width": 3}
TOKENS = abstract_rows(inputs=(ROWS // 2, 16), targets=(ROWS // 2, 16), weights=(ROWS // 2, 16), example=(ROWS // 2,))
TABLE = {
    **abstract_rows(targets=(8 * ROWS,), weights=(8 * ROWS,), example=(8 * ROWS,)),
    "inputs": jax.ShapeDtypeStruct((8 * ROWS, 3), np.float32),
}
STEPS = {
    "linear": (mlp(MLPConfig(features=3, classes=3, widths=())), TABLE, {"data": 8}),
    "mlp": (mlp(MLPConfig(features=3, classes=3, widths=(3, 2))), TABLE, {"data": 8}),
    "transformer": (transformer(TransformerConfig(**SIZES)), TOKENS, {"data": 8}),
    "moe": (moe(MoEConfig(**SIZES, experts=2)), TOKENS, {"data": 4, "expert": 2}),
}


@pytest.mark.slow
@pytest.mark.long_cases("moe")
@pytest.mark.usefixtures("user_compilation")
@pytest.mark.parametrize("name", STEPS)
def test_no_step_has_the_pattern(name):
    """Training and evaluation, with the sizes of the fault wherever a model can have them."""
    model, batch, strategy = STEPS[name]
    step = build_step(model, optax.adamw(1e-3), lay_out(model, strategy))
    assert reduced_products(step.compile(batch).as_text()) == []
    evaluation = jax.jit(step.measure).lower(step.abstract_state().params, batch).compile()
    assert reduced_products(evaluation.as_text()) == []


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_finds_the_operands_that_a_scan_carries(is_differentiated):
    """One constant, two carried values, and two stacked ones."""

    def turn(carried, stacked, factor):
        x, count = carried
        first, second = stacked
        return (jnp.tanh(x @ first) * factor, count + 1.0), (x.sum(), second)

    def loss(x, stacks, factor):
        carried, sums = lax.scan(lambda *both: turn(*both, factor), (x, 0.0), stacks)
        return carried[0].sum() + sums[0].sum()

    function = jax.grad(loss) if is_differentiated else loss
    stacks = jnp.ones((9, 6, 6)), jnp.ones((9, 6))
    program = jax.make_jaxpr(function)(jnp.ones((5, 6)), stacks, jnp.ones(())).jaxpr
    forward = next(equation for equation in program.eqns if equation.primitive.name == "scan")
    carried = carried_by_scan(forward)
    shapes = [variable.aval.shape for variable in forward.invars]
    assert shapes[: carried.start] == [()]
    assert shapes[carried.start : carried.stop] == [(5, 6), ()]
    assert all(shape[0] == 9 for shape in shapes[carried.stop :])
    assert [variable.aval.shape for variable in forward.outvars[: len(carried)]] == [(5, 6), ()]
