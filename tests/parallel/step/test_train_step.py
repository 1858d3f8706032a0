"""The step as a whole: state, donation, metrics, errors, lowering without devices, models that do not type."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import FSDPConfig, Model, Precision, build_step, lay_out
from spmdkit.parallel.step.inputs import shapes_of
from spmdkit.parallel.step.manual_axes import UncheckedStep
from support import toy

import spmdkit

STRATEGY = {"fsdp": FSDPConfig(size=4, floor_bytes=1024), "data": 2}


def run(layouts, optimizer=None, steps=3, model=toy.BLOCK_MODEL, **options):
    step = build_step(model, optimizer or optax.adamw(1e-2), layouts, **options)
    state = step.init(0, params=toy.first_params(model))
    for index in range(steps):
        state, metrics = step(state, toy.batch(index))
    return state, metrics


@pytest.fixture(scope="module")
def layouts():
    return lay_out(toy.BLOCK_MODEL, STRATEGY)


@pytest.fixture(scope="module")
def one_device():
    return lay_out(toy.BLOCK_MODEL, toy.mesh(data=1))


@pytest.fixture(scope="module")
def expected(one_device):
    """The metrics of three steps on one device."""
    return run(one_device)[1]


@pytest.mark.slow
def test_state_keeps_its_layouts_and_is_donated(layouts):
    step = build_step(toy.BLOCK_MODEL, optax.adamw(1e-2), layouts)
    state = step.init(0, params=toy.first_params())
    expected = jax.tree.map(lambda leaf: leaf.sharding, step.abstract_state())
    after, _ = step(state, toy.batch(0))
    assert jax.tree.all(jax.tree.map(lambda leaf, want: leaf.sharding == want, after, expected))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert int(after.step) == 1


def test_no_device_ever_holds_a_whole_large_array():
    big = Model(
        init=lambda key: {"w": jax.random.normal(key, (1024, 1024))}, loss=lambda p, b, key: (p["w"].sum(), 1.0)
    )
    step = build_step(big, optax.adam(1e-3), lay_out(big, {"fsdp": 8}))
    state, key = step.abstract_state(), jax.ShapeDtypeStruct((2,), jnp.uint32)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    programs = (
        jax.jit(step._draw_params, out_shardings=shardings.params).lower(key),
        jax.jit(step._first_state, out_shardings=shardings, donate_argnums=0).lower(state.params, key),
    )
    whole = 1024 * 1024 * 4
    for memory in (program.compile().memory_analysis() for program in programs):
        assert memory.output_size_in_bytes < 3 * whole // 8 + 4096  # parameters and two moments, an eighth of each
        assert memory.temp_size_in_bytes < whole // 2
    state = step.init(0)
    assert {shard.data.shape for shard in state.params["w"].addressable_shards} == {(128, 1024)}


@pytest.fixture(scope="module")
def drawn_by_one_device(one_device):
    return jax.device_get(build_step(toy.DRAWN_MODEL, optax.sgd(1.0), one_device).init(7).params)


def test_initial_parameters_do_not_depend_on_the_mesh(layouts, drawn_by_one_device):
    ours, reference = build_step(toy.DRAWN_MODEL, optax.sgd(1.0), layouts).init(7).params, drawn_by_one_device
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), ours, reference))


@pytest.mark.slow_cases("adafactor", "lamb", "masked chain", "muon")
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adafactor(1e-2, min_dim_size_to_factor=8),  # factored moments: means over rows and columns
        optax.contrib.muon(1e-2),  # orthogonalises whole matrices
        optax.lamb(1e-2),  # a norm for each tensor
        optax.chain(optax.masked(optax.adamw(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 2, p)), optax.sgd(1e-2)),
    ],
    ids=["adafactor", "muon", "lamb", "masked chain"],
)
def test_any_optax_optimizer_is_right_on_shards(layouts, one_device, optimizer):
    ours, _ = run(layouts, optimizer)
    reference, _ = run(one_device, optimizer)
    errors = jax.tree.map(toy.relative, ours.params, reference.params)
    assert max(jax.tree.leaves(errors)) < 1e-4


@pytest.mark.slow
def test_mixed_precision_reduces_in_float32(layouts, expected):
    mixed = Precision(compute="bfloat16")
    step = build_step(toy.BLOCK_MODEL, optax.adamw(1e-2), layouts, precision=mixed)
    text = step.lower(toy.abstract(toy.batch(0))).as_text()
    scatters = [line for line in text.splitlines() if "reduce_scatter" in line]
    gathers = [line for line in text.splitlines() if "all_gather" in line and "->" in line]
    assert scatters
    assert gathers
    assert all("bf16" in line for line in gathers)
    assert toy.summed_dtypes(text) == {"f32"}
    narrow = Precision(compute="bfloat16", reduce="bfloat16")
    step = build_step(toy.BLOCK_MODEL, optax.adamw(1e-2), layouts, precision=narrow)
    assert "bf16" in toy.summed_dtypes(step.lower(toy.abstract(toy.batch(0))).as_text())
    state, metrics = run(layouts, precision=mixed)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert toy.relative(metrics.loss, expected.loss) < 1e-2


def test_gradients_are_those_that_the_next_step_uses():
    """With its randomness, clipped, at any step; the state is not consumed."""

    def loss(params, batch, key):
        drawn = jax.random.uniform(key, params["w"].shape) if key is not None else 1.0
        return (params["w"] * drawn).sum() * batch["inputs"].shape[0], jnp.float32(batch["inputs"].shape[0])

    keeps_gradients = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda gradients, _, params=None: (gradients, gradients)
    )
    model = Model(init=lambda key: {"w": jnp.ones((4, 4))}, loss=loss)
    step = build_step(model, keeps_gradients, lay_out(model, {"data": 2}, devices=toy.devices(2)), clip_norm=0.5)
    state = step.init(0)
    for _ in range(3):
        expected, metrics = jax.device_get(step.gradients(state, toy.batch(0)))
        state, used = step(state, toy.batch(0))
        np.testing.assert_allclose(state.opt_state["w"], expected["w"], rtol=1e-6)
        assert float(used.grad_norm) == pytest.approx(float(metrics.grad_norm), rel=1e-6)


@pytest.mark.slow
def test_a_model_whose_loops_do_not_type_still_trains():
    def init(key):
        return {"table": jax.random.normal(key, (32, 16)), "w": jax.random.normal(key, (16, 16)) * 0.1}

    def loss(params, batch, key):
        def cell(carry, x):
            carry = jnp.tanh(carry @ params["w"] + x)
            return carry, (carry**2).sum()

        x = params["table"][batch["inputs"]].swapaxes(0, 1)
        _, losses = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)  # constant state: not typed as varying
        return losses.sum(), jnp.float32(x.shape[1])

    model = Model(init=init, loss=loss)
    reference, expected = run(lay_out(model, toy.mesh(data=1)), optax.sgd(1e-2), model=model)
    layouts = lay_out(model, {"fsdp": FSDPConfig(size=4, floor_bytes=0), "data": 2})
    with pytest.warns(UncheckedStep, match="its numbers are the same"):
        state, metrics = run(layouts, optax.sgd(1e-2), model=model)
    assert toy.relative(metrics.loss, expected.loss) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, state.params, reference.params))) < 1e-5


def test_other_shapes_than_compiled_ones_warn_of_a_recompilation(layouts):
    step = build_step(toy.BLOCK_MODEL, optax.sgd(1e-2), layouts)
    step._run = step._compiled[shapes_of(toy.batch(0))] = lambda state, batch: (state, {})  # compiles nothing
    with pytest.warns(RuntimeWarning, match=r"compiled again.*inputs \(16, 8\) -> \(32, 8\).*Keep shapes fixed"):
        step(None, toy.batch(1, rows=32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "train.accumulate=0"),
        ({"clip_norm": float("nan")}, "train.clip_norm=nan must be positive and finite"),
        ({"clip_norm": float("inf")}, "train.clip_norm=inf must be positive and finite"),
        ({"clip_norm": -1.0}, "or 0 for no clipping"),
        ({"remat": "some"}, "train.remat='some'.*none, dots, selective, local, full"),
    ],
)
def test_rejects_options_out_of_range(layouts, options, message):
    with pytest.raises(ValueError, match=message):
        build_step(toy.BLOCK_MODEL, optax.sgd(1.0), layouts, **options)


def linear_step(**options):
    model = spmdkit.Model(
        init=lambda key: {"w": jax.random.normal(key, (4,))},
        loss=lambda params, rows, key: ((rows["inputs"] @ params["w"]).sum(), rows["weights"].sum()),
    )
    return spmdkit.build_step(model, optax.sgd(0.1), spmdkit.lay_out(model, {"data": 8}), **options)


def rows():
    return {"inputs": np.ones((8, 4), np.float32), "weights": np.ones(8, np.float32)}


def test_an_option_that_XLA_does_not_know_is_its_error():
    step = linear_step(xla={"xla_nope": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_nope'"):
        step.compile({name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in rows().items()})
    params = linear_step().init(0).params
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nope"):
        step.evaluate(params, rows())
