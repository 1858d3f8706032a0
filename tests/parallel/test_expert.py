"""Dispatch and combine by themselves, experts block by block, and whole steps with the axis `expert` in their mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec
from spmdkit.models.moe import MixtureOfExperts, MoEConfig, moe
from spmdkit.parallel import FSDPConfig, census, lay_out
from spmdkit.parallel.blocks.grouped_experts import apply_experts
from spmdkit.parallel.context import ContextConfig, local_positions
from spmdkit.parallel.expert import (
    ExpertConfig,
    buffer_of,
    combine,
    dispatch,
    placement,
    places,
    size_problems,
    traffic,
)
from spmdkit.parallel.model import ParallelContext
from spmdkit.parallel.xla.census import calls_of, computations_of
from support import rows, toy

EXPERTS, TOP_K, POSITIONS, WIDTH = 8, 3, 24, 4
ROWS, LENGTH = 8, 16
SIZES = MoEConfig(
    vocabulary=toy.VOCABULARY,
    length=LENGTH,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    mlp_width=32,
    experts=4,
    capacity_factor=1.0,
    auxiliary_loss=0.1,
    z_loss=0.01,
)
SMALL_FSDP = FSDPConfig(size=2, floor_bytes=256)


def choices(devices=1, seed=0, skewed=False):
    """Different experts for each position; skewed: all positions choose the first ones."""
    random = np.random.default_rng(seed)
    scores = random.random((devices * POSITIONS, EXPERTS))
    if skewed:
        scores[:] = np.arange(EXPERTS)
    return np.argsort(scores, axis=1)[:, :TOP_K].astype(np.int32)


def dropless(devices):
    return buffer_of(ExpertConfig(size=devices), 0, experts=EXPERTS, top_k=TOP_K, positions=POSITIONS, limit=POSITIONS)


@cache
def there_and_back(devices):
    """(x, weights, chosen, kept) -> what comes back, compiled."""

    def run(x_ND, weights_eD, expert_Nk, kept_Nk):
        buffer = dropless(devices)
        placed = placement(buffer, expert_Nk, kept_Nk)
        x_MD, expert_b = dispatch(placed, x_ND)
        y_MD = apply_experts(lambda weights, x_mD: x_mD * weights[None, :], weights_eD, x_MD, expert_b, buffer.expected)
        return combine(placed, y_MD)

    spec = PartitionSpec("expert")
    mapped = jax.shard_map(run, mesh=toy.mesh(expert=devices).backend_mesh, in_specs=(spec,) * 4, out_specs=spec)
    shapes = (devices * POSITIONS, WIDTH), (EXPERTS, WIDTH), (devices * POSITIONS, TOP_K), (devices * POSITIONS, TOP_K)
    dtypes = jnp.float32, jnp.float32, jnp.int32, jnp.bool
    return jax.jit(mapped).lower(*map(jax.ShapeDtypeStruct, shapes, dtypes)).compile()


@pytest.mark.slow_cases("4-False", "8-False")
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_choices_reach_their_experts_and_return(devices, skewed):
    """Expert e multiplies by a vector of its own: what comes back is that, and zeros for what was dropped."""
    random = np.random.default_rng(1)
    x = random.normal(size=(devices * POSITIONS, WIDTH)).astype(np.float32)
    weights = random.normal(size=(EXPERTS, WIDTH)).astype(np.float32)
    chosen, kept = choices(devices, skewed=skewed), random.random((devices * POSITIONS, TOP_K)) < 0.8
    expected = x[:, None, :] * weights[chosen] * kept[:, :, None]
    np.testing.assert_array_equal(there_and_back(devices)(x, weights, chosen, kept), expected)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_census_equals_the_cost(devices):
    moved = traffic(dropless(devices), width=WIDTH, dtype="float32", platform="cpu").forward
    assert census(there_and_back(devices).as_text(), toy.mesh(expert=devices)) == tuple(moved)


@pytest.mark.parametrize("overhead", [0, 250])
@pytest.mark.parametrize("most", [POSITIONS, 5])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_buffers_hold_the_worst_case(devices, most, overhead):
    """All choices fit, as many as capacity allows, whichever experts they are for."""
    buffer = buffer_of(
        ExpertConfig(size=devices), overhead, experts=EXPERTS, top_k=TOP_K, positions=POSITIONS, limit=most
    )
    assert buffer.rows % buffer.block == 0

    @jax.jit
    def placed(chosen):
        place, _ = places(chosen.reshape(1, -1), None, EXPERTS)
        kept = (place < most).reshape(chosen.shape)
        found = placement(buffer, chosen, kept)
        return found.row_Nk, found.choice_M, kept

    for chosen in (choices(), choices(skewed=True), choices(skewed=True)[:, ::-1]):
        row, choice, kept = map(np.asarray, placed(chosen))
        used = row[kept]
        assert len(set(used.tolist())) == kept.sum()  # a row of its own for each
        np.testing.assert_array_equal(used // buffer.rows, chosen[kept] // buffer.experts)
        np.testing.assert_array_equal(choice[used], np.flatnonzero(kept))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("positions", "most"), [(1024, 1024), (1024, 300), (8, 8)])
def test_expects_the_blocks_that_uniform_choices_fill(devices, positions, most):
    """On average over the devices: each expert's last block from each device is half full."""
    config = ExpertConfig(size=devices)
    buffer = buffer_of(config, 0, experts=EXPERTS, top_k=TOP_K, positions=positions, limit=most)
    scores = np.random.default_rng(0).random((devices, positions, EXPERTS))
    chosen = np.argsort(scores, axis=2)[:, :, :TOP_K].reshape(devices, -1)
    filled = [-(-min(count, most) // buffer.block) for each in chosen for count in np.bincount(each, minlength=EXPERTS)]
    assert buffer.expected == pytest.approx(sum(filled) / devices, rel=0.1)


def test_loops_over_blocks_record_their_expected_turns():
    """Forward and backward, for each of 2 experts, in the text of the compiled program; XLA does not know them."""
    weights, x, expert_b = jnp.ones((2, 4, 4)), jnp.ones((12, 4)), jnp.array([0, 0, 1, 1, 2, 2], jnp.int32)

    def loss(weights, x, expert_b):
        return jnp.sum(apply_experts(lambda weights, x_mD: x_mD @ weights, weights, x, expert_b, 5) ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x, expert_b).compile().as_text()
    lines = [line for lines in computations_of(text)[0].values() for line in lines if " while(" in line]
    assert sorted(call.times for line in lines for call in calls_of(line) if call.times != 1) == [2, 2, 2.5, 2.5]


@pytest.mark.parametrize(
    ("experts", "devices", "top_k", "positions", "limit", "overhead", "block"),
    [
        (8, 1, 2, 16384, 5120, 284, 1280),  # Mixtral 8x7B, 4 rows of 4,096 on one GPU
        (8, 8, 2, 32768, 10240, 284, 2048),
        (128, 8, 8, 16384, 1280, 1521, 1280),  # Qwen3 30B-A3B
        (128, 8, 8, 16384, 16384, 250, 768),
    ],
)
def test_blocks_on_gpus_take_little_more_than_the_fewest_seconds(
    experts, devices, top_k, positions, limit, overhead, block
):
    """In units of a row's products: a block takes its rows and its overhead."""
    sizes = {"experts": experts, "top_k": top_k, "positions": positions, "limit": limit}
    buffer = buffer_of(ExpertConfig(size=devices), overhead, **sizes)
    small = buffer_of(ExpertConfig(size=devices), 0, **sizes)
    assert buffer.block == block
    assert buffer.rows <= 1.13 * small.rows

    def cost(rows):
        return (positions * top_k / rows + experts / 2) * (rows + overhead)

    assert cost(block) <= 1.05 * min(map(cost, range(128, 8192, 128)))


def test_the_cost_of_capacity_and_of_none():
    """Capacity sends about factor * top_k positions, dropless top_k for each device in the worst case."""
    sizes = {"experts": 64, "top_k": 2, "positions": 8192}
    config = ExpertConfig(size=8)
    limited = buffer_of(config, 0, **sizes, limit=8192 * 2 * 5 // (64 * 4))  # factor 1.25
    assert (limited.devices * limited.rows, limited.block) == (64 * 320, 64)
    unlimited = buffer_of(config, 0, **sizes, limit=8192)
    assert unlimited.rows == 8192 * 2 + 8 * 63 // 64 * 64
    moved = traffic(limited, width=16, dtype="bfloat16", platform="cuda")
    assert [(line.count, line.bytes) for line in (*moved.forward, *moved.backward)] == [
        (3, 2 * 64 * 320 * 16 * 2 + 64 * 4),
        (2, 2 * 64 * 320 * 16 * 2),
    ]


def batch():
    return toy.batch(3, ROWS, length=LENGTH)


def config(**changes):
    return MoEConfig(**(vars(SIZES) | changes))


def options(**changes):
    return moe(config(**changes))


STEPS = {  # (strategy, changes of the model, options of the step): what the table's rows with experts leave out
    "dropless": ({"expert": 2, "data": 2}, {"capacity_factor": 0.0}, {"accumulate": 2}),
    "dropless-context": ({"expert": 2, "context": 4}, {"capacity_factor": 0.0, "auxiliary_loss": 0.0}, {}),
    "top1-tensor": ({"expert": 2, "tensor": 2}, {"top_k": 1}, {"remat": "full"}),
    "tied-fsdp": ({"expert": 2, "fsdp": SMALL_FSDP}, {"tied": True}, {"remat": "dots"}),
    "dropout-fsdp-context": (
        {"expert": 2, "fsdp": SMALL_FSDP, "context": 2},
        {"dropout": 0.1},
        {"accumulate": 2, "remat": "full"},
    ),
}
QUICK = ("dropless", "top1-tensor")


@cache
def first_params(tied):
    """Parameters of any of the models, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.jit(options(tied=tied).init)(jax.random.key(0)))


@cache
def one_device(changes):
    """First parameters, and their mean loss and its gradients in plain JAX on one device."""
    params, key = first_params("tied" in dict(changes)), jax.random.fold_in(jax.random.key(0), 0)
    (total, weight), sums = reference.mixture.differentiate(config(**dict(changes)), params, batch(), key)
    return params, total / weight, jax.tree.map(lambda leaf: leaf / weight, sums)


@pytest.mark.slow_cases("dropless", "top1-tensor")
@pytest.mark.long_cases("dropless-context", "dropless", "dropout-fsdp-context", "tied-fsdp", "top1-tensor")
@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in STEPS]
)
def test_step_equals_one_device(name, float64):
    """Loss and every gradient; what moves is what the cost says, and no device holds another's experts."""
    strategy, changes, how = STEPS[name]
    model, arrays = options(**changes), batch()
    step = toy.build(strategy, rows.optimizer(), model, precision=toy.FLOAT64, **how)
    found = census(step.compile(toy.abstract(arrays)).as_text(), step.plan.mesh)
    assert found == step.cost(toy.abstract(arrays))
    params, loss, gradients = one_device(tuple(changes.items()))
    state = step.init(0, params)
    gate = state.params["blocks"]["mlp"]["gate"]
    assert gate.sharding.shard_shape(gate.shape)[1] == gate.shape[1] // strategy.get("expert", 1)
    state, metrics = step(state, arrays)
    assert toy.relative(metrics.loss, loss) < 1e-12
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, state.opt_state[0].gradients, gradients))) < 1e-12


@pytest.mark.parametrize(("attention", "factor"), [("ring", 1.0), ("all_to_all", 0.0)])
def test_routes_split_rows_like_whole_ones(attention, factor, float64):
    """Places are counted in the order of positions, wherever these are; shares of the losses add up."""
    context = ContextConfig(size=4, attention=attention)
    router, x = np.random.default_rng(4).normal(size=(6, 4)), np.random.default_rng(5).normal(size=(2, 16, 6))
    x[:, :, 0], router[0] = 1.0, (2.0, 0.0, 0.0, 0.0)  # one expert is liked best, and runs out of places
    parallel, own = (
        ParallelContext(context=context),
        MoEConfig(experts=4, capacity_factor=factor, auxiliary_loss=0.5, z_loss=0.25),
    )

    def local(x):
        held = local_positions(16, context)
        routing = MixtureOfExperts(own, parallel).route(jnp.asarray(router), jnp.take(x, held, axis=1))
        return held, routing.expert_BLk, routing.kept_BLk, jax.lax.psum(routing.loss_B, "context")

    rows = PartitionSpec(None, "context")
    mesh = toy.mesh(context=4).backend_mesh
    specs = (PartitionSpec("context"), rows, rows, PartitionSpec())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    held, expert, kept, losses = jax.jit(mapped)(x)
    right = jax.jit(lambda: reference.mixture.route(own, jnp.asarray(router), jnp.asarray(x)))()
    assert right[2].sum() > 0
    assert (right[2].sum() < right[2].size) == (factor > 0)
    np.testing.assert_array_equal(expert, np.asarray(right[0])[:, held])
    np.testing.assert_array_equal(kept, np.asarray(right[2])[:, held])
    np.testing.assert_allclose(losses, right[3], rtol=1e-12)


def test_sizes_that_do_not_fit():
    assert [*size_problems(ExpertConfig(size=4), 8), *size_problems(ExpertConfig(), 7)] == []
    assert [*size_problems(ExpertConfig(size=4), 6)] == [
        "model.experts=6 cannot be split over strategy.expert=4: 6 % 4 = 2. Set model.experts to a multiple of 4, or "
        "strategy.expert to a divisor of 6."
    ]
    with pytest.raises(ValueError, match=r"model\.experts=4 cannot be split over strategy\.expert=8: 4 % 8 = 4"):
        lay_out(options(), {"expert": 8})
