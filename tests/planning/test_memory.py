"""The analytic memory of a step: values of traced programs, kinds, remedies, and its distance from the compiler's."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from spmdkit.configs import Config, load_config
from spmdkit.mesh import targets
from spmdkit.planning import memory
from spmdkit.planning.memory import AnalyticMemory, _changes, analytic_memory, peak_of
from spmdkit.planning.run_plan import plan_run
from spmdkit.runtime.build_run import build

from spmdkit import list_devices

X = jax.ShapeDtypeStruct((10, 10), jnp.float32)
SIZE = 400


def stacked(x):
    _, kept = lax.scan(lambda carry, _: (carry, carry @ x), x, length=5)
    total, _ = lax.scan(lambda carry, one: (carry + one, None), jnp.zeros_like(x), kept)
    return jnp.sum(total)


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda x: jnp.sum(jnp.exp(x) + jnp.sin(x)), 0),  # fused
        (lambda x: jnp.sum(jnp.exp(x) @ x), 2),  # stored for a product
        (lambda x: jnp.sum(jnp.exp(jnp.sum(x[:, None] * x[None], axis=2))), 1),  # stored after a sum
        (lambda x: lax.fori_loop(0, 5, lambda _, carry: carry + 1, x @ x), 1),  # updated in place
        (stacked, 6),
    ],
)
def test_values_are_in_memory_from_their_operation_to_their_last_use(function, arrays):
    """A loop that reads 5 stacked arrays carries one more."""
    peak = peak_of(jax.make_jaxpr(function)(X).jaxpr)
    assert arrays * SIZE <= peak.total() <= arrays * SIZE + 16
    assert peak["activations"] == (5 * SIZE if function is stacked else 0)


HEADS, HEAD, WIDTH, LENGTH = 2, 3, 6, 7


def mlp(params, x):
    first, second, last = params
    return jnp.tanh(jnp.tanh(x @ first) @ second) @ last


def conv_net(params, x):
    first, second, head = params
    x = jax.nn.relu(lax.conv_general_dilated(x, first, (1, 1), "SAME"))
    x = jax.nn.relu(lax.conv_general_dilated(x, second, (2, 2), "SAME"))
    return x.mean((2, 3)) @ head


def scanned(params, x):
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, params)[0]


def attention(params, x):
    query, key, value, out = params
    heads = [(x @ matrix).reshape(*x.shape[:2], HEADS, HEAD) for matrix in (query, key, value)]
    return jax.nn.dot_product_attention(*heads).reshape(x.shape) @ out


def two_recomputed(params, x):
    block = jax.checkpoint(attention)
    return block(params[1], block(params[0], x))


ROWS = 50
MATRICES = [(WIDTH, WIDTH)] * 4
RESIDUAL = ROWS * LENGTH * WIDTH
SCORES = ROWS * HEADS * LENGTH * LENGTH
STATISTICS = ROWS * HEADS * LENGTH
KEPT = {
    "the results of two tanh": (mlp, [(6, 8), (8, 7), (7, 3)], (ROWS, 6), ROWS * (8 + 7)),
    "a convolution, its relu, a convolution, and the mean of its relu": (
        conv_net,
        [(4, 1, 3, 3), (6, 4, 3, 3), (6, 10)],
        (ROWS, 1, 8, 8),
        ROWS * (2 * 4 * 8 * 8 + 6 * 4 * 4 + 6),
    ),
    "the input and the cosine of each turn": (scanned, (9, 6, 6), (ROWS, 6), 9 * 2 * ROWS * 6),
    "three inputs of attention, the scores before and after softmax, their maxima and sums": (
        attention,
        MATRICES,
        (ROWS, LENGTH, WIDTH),
        3 * RESIDUAL + 2 * SCORES + 2 * STATISTICS,
    ),
    "the input of the second block": (two_recomputed, [MATRICES] * 2, (ROWS, LENGTH, WIDTH), RESIDUAL),
}


@pytest.mark.parametrize("what", KEPT)
def test_models_without_blocks_keep_what_backward_reads_of_forward(what):
    function, params, rows, elements = KEPT[what]
    arrays = [
        jax.tree.map(jnp.zeros, shapes, is_leaf=lambda shape: isinstance(shape, tuple)) for shapes in (params, rows)
    ]
    program = jax.make_jaxpr(jax.grad(lambda params, x: jnp.sum(function(params, x))))(*arrays).jaxpr
    assert peak_of(program, has_blocks=False)["activations"] == 4 * elements
    assert peak_of(program, has_blocks=False).total() == peak_of(program).total()


def test_stacks_that_a_program_returns_are_gradients():
    peak = peak_of(jax.make_jaxpr(lambda x: lax.scan(lambda carry, _: (carry, carry @ x), x, length=5)[1])(X).jaxpr)
    assert (peak["gradients"], peak["activations"]) == (5 * SIZE, 0)


@pytest.mark.parametrize(("unrolled", "arrays"), [(1, 4), (2, 6)])
def test_loops_compute_late_what_the_next_turn_does_not_need(unrolled, arrays):
    """With two turns, the late product of the first keeps its operands, the sine and a slice, during the second."""

    def turn(carry, one):
        return carry @ one, jnp.sin(carry) @ one

    stack = jax.ShapeDtypeStruct((4, 10, 10), jnp.float32)
    peak = peak_of(jax.make_jaxpr(lambda x, xs: lax.scan(turn, x, xs))(X, stack).jaxpr, unrolled)
    assert peak == {"temporaries": arrays * SIZE, "gradients": 4 * SIZE}


def test_zeros_of_one_size_are_made_together():
    """Those of the second loop are in memory during the first one."""

    def program(x):
        first = jnp.sum(lax.fori_loop(0, 5, lambda _, carry: carry + x, jnp.zeros_like(x)))
        return lax.fori_loop(0, 5, lambda _, carry: carry * first, jnp.zeros_like(x))

    assert peak_of(jax.make_jaxpr(program)(X).jaxpr).total() // SIZE == 2


def abstract_mesh():
    """A mesh of two devices that need not exist."""
    return jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize(("dim", "copied"), [(0, 0), (1, 4)])
def test_inputs_whose_slices_are_gathered_inside_other_dims_are_copied(dim, copied):
    """A stack of 4 arrays, each of which a loop gathers over 2 devices."""

    def program(stack):
        def turn(carry, index):
            return carry + jnp.sum(lax.all_gather(stack[index], "fsdp", axis=dim, tiled=True) @ jnp.ones((20, 1))), None

        return lax.scan(turn, jnp.zeros(()), jnp.arange(4))[0]

    mesh = abstract_mesh()
    stack = jax.ShapeDtypeStruct((4, 20, 20), jnp.float32)
    spec = jax.P(None, *[None] * dim, "fsdp")
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)
    peak = peak_of(jax.make_jaxpr(mapped)(stack).jaxpr.eqns[0].params["jaxpr"])
    assert peak["communication"] == (1 + dim) * 4 * SIZE + copied * 2 * SIZE


def test_gathers_inside_other_dims_take_their_bytes_twice():
    """They arrive with the gathered dim outermost, and are copied to the layout of a product; so is their input."""
    mesh = abstract_mesh()
    for dim, copies in ((0, 1), (1, 2)):

        def gathered(x, dim=dim):
            whole = lax.all_gather(x, "fsdp", axis=dim, tiled=True)
            return jnp.sin(whole) @ whole.T

        spec = jax.P(*[None] * dim, "fsdp")
        program = jax.make_jaxpr(jax.shard_map(gathered, mesh=mesh, in_specs=spec, out_specs=jax.P("fsdp")))(X)
        peak = peak_of(program.jaxpr.eqns[0].params["jaxpr"])
        assert peak["communication"] == copies * SIZE + dim * SIZE // 2
        assert peak["temporaries"] == 2 * SIZE


@pytest.mark.parametrize(("gradients", "peak"), [(4, 100 + 9), (40, 100 + 40)])
def test_gradients_count_once_beside_what_the_program_needs(gradients, peak):
    state = {"parameters": 70, "optimizer": 30, "gradients": gradients}
    assert AnalyticMemory(state, activations=2, communication=3, other=4).peak_bytes == peak


SMALL = "model.layers=4 model.width=256 data.length=256 train.global_batch=32 precision.compute=bfloat16"

SMALLER = "model.layers=2", "model.width=64", "train.global_batch=16"


def planned(target, *overrides):
    return plan_run(load_config("fsdp", [*SMALL.split(), *overrides], sizes=False), target)


def test_remat_keeps_fewer_activations(without_compiler):
    kept = {}
    for remat in ("none", "dots", "full"):
        config = load_config("fsdp", [*SMALL.split(), "strategy={fsdp: 8}", f"train.remat={remat}"], sizes=False)
        found = analytic_memory(build(config, devices=list_devices(target="h100:1x8")))
        kept[remat] = found.activations
        assert found.peak_bytes > sum(found.state.values()) - found.state["gradients"] + found.activations
    inputs = 3 * (32 // 8) * 256 * 256 * 2  # of the blocks in the loop; the last one is outside
    assert kept["none"] > 1.3 * kept["dots"] > 3 * kept["full"]
    assert inputs <= kept["full"] <= 2 * inputs


def test_remedies_need_less_and_the_largest_saving_is_last(monkeypatch):
    needed = {"more shards": 3, "microbatches": 9, "recomputation": 5}
    monkeypatch.setattr(memory, "_changes", lambda config, devices: [(change, change) for change in needed])
    monkeypatch.setattr(memory, "build", lambda config, devices: config)
    monkeypatch.setattr(memory, "analytic_memory", lambda change: SimpleNamespace(peak_bytes=needed[change]))
    found = memory.find_remedies(Config(), "h100:1x8", 9)
    assert found == (memory.Remedy("recomputation", 5), memory.Remedy("more shards", 3))


@pytest.fixture
def small_card(tmp_path):
    """An H100 with a few MB."""
    text = (targets.CARDS / "h100.yaml").read_text()
    path = tmp_path / "card.yaml"
    path.write_text(text.replace("memory_bytes: 84942979072", "memory_bytes: 2000000"))
    return path


@pytest.mark.slow
def test_names_changes_that_need_less_memory(without_compiler, small_card):
    settings = f"{small_card}:1x8", "strategy={data: 4, fsdp: 2}", *SMALLER
    found = planned(*settings, "train.remat=none")
    assert found.fits is False
    remedies = {each.change: each.peak_bytes for each in found.remedies}
    assert {"strategy.fsdp=8 without strategy.data", "train.remat=full", "train.accumulate=2"} <= remedies.keys()
    assert max(remedies.values()) < found.peak_bytes
    changed = planned(*settings, "train.remat=full")
    assert changed.peak_bytes == remedies["train.remat=full"]
    assert "DOES NOT FIT" in str(found)
    assert "with train.remat=full (analytic)" in str(found)


def test_changes_are_recomputation_microbatches_and_shards():
    """A pipeline is not split into further microbatches."""
    shards = "strategy.fsdp=4 without strategy.data"
    for axis, microbatches in (("pipe", []), ("tensor", [f"train.accumulate={number}" for number in (6, 12, 24)])):
        changed = [f"strategy={{{axis}: 2, data: 4}}", "train.remat=none", "train.accumulate=3"]
        config = load_config("fsdp", [*SMALL.split(), *changed], sizes=False)
        found = dict(_changes(config, list_devices(target="h100:1x8")))
        again = ["train.remat=full", *(f"train.remat=full {each}" for each in microbatches)]
        assert list(found) == [*microbatches, *again, shards]
        assert all(each.train.remat == ("full" if "full" in change else "none") for change, each in found.items())
        assert {name: each.size for name, each in found[shards].strategy.items()} == {"fsdp": 4, axis: 2}


@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.parametrize(("preset", "target"), [("llama3_8b", "h100:16x8"), ("gpt2_124m", "h100:1x8")])
def test_analytic_memory_is_near_that_of_the_compiler(preset, target):
    config = load_config(preset, [], sizes=False)
    plan = plan_run(config, target)
    built = build(config, devices=list_devices(target=target))
    memory = built.step.compile(built.batch).memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert plan.peak_bytes == sizes - memory.alias_size_in_bytes
    assert plan.temporaries == memory.temp_size_in_bytes
    assert plan.analytic.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.1)


LARGE = (
    "model.width=2048 model.heads=16 model.layers=8 data.length=2048 precision.compute=bfloat16 train.global_batch=64"
)
STRATEGIES = (
    *("3d", "compressed", "context", "data_parallel", "diloco", "fsdp", "fsdp_tensor", "hsdp", "moe", "pipeline"),
    *("quickstart", "tensor", "zero"),
)


@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.parametrize("preset", STRATEGIES)
def test_analytic_memory_of_each_strategy_is_near_that_of_the_compiler(preset):
    """Strategies of the small presets, with blocks of a size for which GPUs are used."""
    sizes = [*LARGE.split(), *(["model.mlp_width=2048"] if preset == "moe" else [])]
    plan = plan_run(load_config(preset, sizes, sizes=False), "h100:1x8")
    assert plan.temporaries is not None
    assert plan.analytic.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.1)
