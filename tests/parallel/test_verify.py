"""Strategies are as one device; each planted mistake is found, named and explained."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from jax import lax
from spmdkit.parallel import BlockModel, FSDPConfig, Model, Precision, diagnosis, local_step, verify
from spmdkit.parallel import step as step_file
from spmdkit.parallel.oracle import OneDevice, prepared
from spmdkit.parallel.pipeline_stage import Stage

ROWS, WIDTH, CLASSES = 16, 16, 8
MESH = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=512)}
AXES = ("data", "fsdp")


def init(key):
    """Another matrix for every seed, of operations that compile fast."""
    index = jnp.arange(WIDTH * WIDTH, dtype=jnp.uint32) + jax.random.key_data(key)[-1]
    first = (index * jnp.uint32(2654435761) >> 8).astype(jnp.float32) * 2.0**-24 - 0.5
    return {
        "first": first.reshape(WIDTH, WIDTH),
        "scale": jnp.ones(WIDTH),
        "second": jnp.zeros((WIDTH, CLASSES)),
    }


def loss(params, batch, key):
    hidden = jnp.tanh(batch["inputs"] @ params["first"]) * params["scale"][None]
    return toy.cross_entropy(hidden @ params["second"], batch)


MODEL = Model(init=init, loss=loss)


def batches(steps=2):
    random = np.random.default_rng(0)
    return [
        {
            "inputs": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
            "targets": random.integers(0, CLASSES, ROWS).astype(np.int32),
            "weights": random.choice([0.25, 0.5, 1.0], ROWS).astype(np.float32),
            "example": np.arange(ROWS, dtype=np.int32),
        }
        for _ in range(steps)
    ]


OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)


class CompiledOnce(OneDevice):
    """One device, whose first parameters are kept as well."""

    init = cache(OneDevice.init)


def once(function):
    """Keeps what it makes of a model itself: one with rules has no hash."""
    kept = {}

    def call(model, *given, **options):
        key = (id(model), *given, *options.items())
        if key not in kept:
            kept[key] = model, function(model, *given, **options)
        return kept[key][1]

    return call


SHARED = {"prepared": once(prepared), "OneDevice": once(CompiledOnce)}


@pytest.fixture(autouse=True)
def one_device_is_compiled_once(monkeypatch):
    """For all tests of a model: what they plant is in the strategies."""
    for name, shared in SHARED.items():
        monkeypatch.setitem(verify.__globals__, name, shared)


def given_init(key):
    """Parameters of the toy as constants, which compile faster than draws."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(toy.init, key)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.3, jnp.float32), shapes)


BLOCK_MODEL = replace(toy.BLOCK_MODEL, init=given_init)


def verified(model=MODEL, strategy=MESH, *, optimizer=OPTIMIZER, **options):
    return verify(model, strategy, batches(), optimizer=optimizer, devices=toy.devices(4), **options)


def found(result, what, where, *texts):
    """The first difference is this one, and is explained so."""
    first = result.first_difference
    assert not result.ok
    assert (first.what, first.where) == (what, where), first
    for text in texts:
        assert text in first.hint
    assert first.hint in " ".join(str(result).split())
    assert result.to_json()["ok"] is False
    return first


@contextmanager
def unchecked(monkeypatch):
    """Without JAX's own check of what varies over the mesh, as for a model that does not type."""
    checked = jax.shard_map
    with monkeypatch.context() as patch:
        patch.setattr(jax, "shard_map", lambda *given, **options: checked(*given, **{**options, "check_vma": False}))
        yield


# What is right


@cache
def right():
    return verified(accumulate=2, clip_norm=0.1)


def test_everything_agrees():
    result = right()
    assert result.ok, str(result)
    assert {path for _, path in result.gradients} == {"first", "scale", "second"}
    assert result.losses == pytest.approx(result.reference_losses, rel=1e-12)
    assert result.tolerance == result.params_tolerance == 1e-9
    assert max(result.loss_rel, result.gradients[0].relative, result.grad_norm_rel, result.params[0].relative) < 1e-13
    assert result.collectives.found == result.collectives.predicted != ()
    assert "The same as on one device." in str(result)
    assert not jax.config.jax_enable_x64


def test_json_has_what_programs_read():
    result = right().to_json()
    json.dumps(result, allow_nan=False)
    for key in ("ok", "mesh", "loss_rel", "grad_max_rel", "worst_leaf", "params_rel", "collectives"):
        assert key in result
    assert {axis: size for axis, size in result["mesh"].items() if size > 1} == {"data": 2, "fsdp": 2}
    assert result["collectives"]["equal"] is True
    assert result["collectives"]["predicted"] == result["collectives"]["found"]
    assert (result["dtype"], result["first_difference"]) == ("float64", None)


@pytest.mark.slow
def test_float32_has_its_own_tolerance():
    result = verified(precision=Precision())
    assert result.ok, str(result)
    assert (result.dtype, result.tolerance) == ("float32", 1e-5)
    assert result.gradients[0].relative > 1e-12


def test_a_model_that_casts_to_float32_is_measured_as_such():
    def narrow(params, batch, key):
        return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), batch, key)

    result = verified(replace(MODEL, loss=narrow))
    assert result.ok, str(result)
    assert (result.dtype, result.tolerance) == ("float64", 1e-5)


@pytest.mark.slow
def test_dropout_is_that_of_one_device():
    def dropped(params, batch, key):
        keys = jax.vmap(lambda example: jax.random.fold_in(key, example))(batch["example"])
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (WIDTH,)))(keys)
        return loss(params, {**batch, "inputs": batch["inputs"] * keep}, None)

    assert verified(replace(MODEL, loss=dropped), accumulate=2).ok


def test_an_optimizer_that_looks_across_elements_may_move_what_nobody_predicts():
    result = verified(optimizer=optax.chain(optax.scale_by_param_block_norm(), optax.sgd(0.1)))
    assert result.ok, str(result)
    assert result.collectives.left_to_xla
    assert "left to XLA" in str(result)


@pytest.mark.slow
def test_blocks_accumulation_and_rules_over_an_axis_of_xla():
    strategy = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=256), "tensor": {"size": 2}}
    rules = {"blocks/up": (None, "fsdp", "tensor")}
    given = [toy.batch(seed) for seed in range(3)]
    result = verify(BLOCK_MODEL, strategy, given, rules=rules, accumulate=2, clip_norm=0.5)
    assert result.ok, str(result)
    assert any("tensor" in line.axes for line in result.collectives.left_to_xla)


# What is wrong


def test_a_missing_sum_is_refused(monkeypatch):
    monkeypatch.setattr(local_step, "reduce_gradients", unsummed("first"))
    found(verified(), "gradients", "first", "JAX refuses the step", "a missing psum over data.")


def unsummed(leaf):
    """Sums everything but one gradient."""
    right = local_step.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, leaf: gradients[leaf]} if isinstance(summed, dict) else summed, scalars

    return wrong


@pytest.mark.parametrize(("leaf", "axes"), [("first", "data"), ("scale", "data x fsdp")])
def test_a_missing_sum_that_nobody_refuses(leaf, axes, monkeypatch):
    monkeypatch.setattr(local_step, "reduce_gradients", unsummed(leaf))
    with unchecked(monkeypatch):
        result = verified()
    texts = (f"Devices along {axes} hold different values, and their sum is the reference",)
    found(result, "gradients", leaf, *texts, f"a missing psum over {axes}", f"lacks {axes}")


@pytest.mark.parametrize("axis", AXES)
def test_a_doubled_sum(axis, monkeypatch):
    right = local_step.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        twice = lax.psum(lax.pcast(summed["scale"], axis, to="varying"), axis)
        return {**summed, "scale": twice}, scalars

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    result = verified(strategy={"data": 4} if axis == "data" else {"fsdp": FSDPConfig(size=4, floor_bytes=512)})
    found(result, "gradients", "scale", f"4 times too large, as when summed twice over {axis} (size 4)")


def test_a_doubled_sum_of_everything_is_not_hidden_by_clipping(monkeypatch):
    right = local_step.accumulate_gradients

    def wrong(*given, axes, **options):
        gradients, sums = right(*given, axes=axes, **options)
        return jax.tree.map(lambda leaf: lax.psum(leaf, axes) / 2, gradients), sums

    monkeypatch.setattr(local_step, "accumulate_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified(strategy={"data": 4}, clip_norm=0.01)
    first = found(result, "gradients", result.gradients[0].path, "2 times the reference everywhere")
    assert first.relative == pytest.approx(1)


@pytest.mark.slow
def test_an_average_instead_of_a_sum(monkeypatch):
    right = local_step.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, "first": summed["first"] / 2}, scalars

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    found(
        verified(), "gradients", "first", "2 times too small, as when averaged instead of summed", "over data (size 2)"
    )


def test_shards_gathered_in_another_order(monkeypatch):
    right = lax.all_gather

    def wrong(shard, axes, **options):
        whole = right(shard, axes, **options)
        return jnp.roll(whole, 1, axis=0) if whole.shape == (WIDTH, WIDTH) else whole

    monkeypatch.setattr(lax, "all_gather", wrong)
    found(verified(), "loss", "", "set to one number the losses agree", "first", "put together wrongly")


def test_a_gradient_scattered_along_the_wrong_dim(monkeypatch):
    right = lax.psum_scatter

    def wrong(gradient, axes, **options):
        return right(gradient.T if gradient.shape == (WIDTH, WIDTH) else gradient, axes, **options)

    monkeypatch.setattr(lax, "psum_scatter", wrong)
    result = verified(strategy={"fsdp": FSDPConfig(size=4, floor_bytes=512)})
    found(result, "gradients", "first", "The same numbers in other places", "(fsdp, None)")


def test_a_mean_of_means(monkeypatch):
    right = local_step.accumulate_gradients

    def wrong(*given, **options):
        gradients, (total, weight) = right(*given, **options)
        mean = jax.tree.map(lambda leaf: leaf / weight, gradients)
        return mean, (total / weight, weight / weight)

    monkeypatch.setattr(local_step, "accumulate_gradients", wrong)
    result = verified(strategy={"data": 4})
    found(result, "loss", "", "divided by a weight of 4, and one device by", "a mean of 4 means")


def test_a_weight_summed_twice(monkeypatch):
    right = local_step.reduce_gradients

    def wrong(gradients, scalars, *rest):
        summed, (total, weight, *others) = right(gradients, scalars, *rest)
        return summed, [total, 4 * weight, *others]

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    result = verified(strategy={"data": 4})
    found(result, "loss", "", "divided by a weight of", "4 times too large, as when summed twice over data (size 4)")


def test_a_dropped_microbatch(monkeypatch):
    right = local_step.accumulate_gradients

    def wrong(local, params, batch, key, *, microbatches, axes):
        fewer = {name: rows[: len(rows) * (microbatches - 1) // microbatches] for name, rows in batch.items()}
        return right(local, params, fewer, key, microbatches=microbatches - 1, axes=axes)

    monkeypatch.setattr(local_step, "accumulate_gradients", wrong)
    result = verified(accumulate=2)
    found(result, "loss", "", "microbatch 2 of the 2 of every device (rows 2, 3, 6, 7,", "is not counted")


@pytest.mark.slow
def test_gradients_of_a_dropped_microbatch(monkeypatch):
    """Loss and weight count it, the gradients do not."""
    right = local_step.accumulate_gradients

    def wrong(local, params, batch, key, *, microbatches, axes):
        _, sums = right(local, params, batch, key, microbatches=microbatches, axes=axes)
        fewer = {name: rows[len(rows) // microbatches :] for name, rows in batch.items()}
        return right(local, params, fewer, key, microbatches=microbatches - 1, axes=axes)[0], sums

    monkeypatch.setattr(local_step, "accumulate_gradients", wrong)
    result = verified(accumulate=4)
    found(result, "gradients", result.gradients[0].path, "Microbatch 1 of the 4 of every device", "is not counted")


@pytest.mark.slow
def test_rows_of_one_place_counted_twice(monkeypatch):
    right = local_step.accumulate_gradients

    def wrong(*given, **options):
        gradients, (total, weight) = right(*given, **options)
        factor = 1 + (lax.axis_index("data") == 1)
        return gradients, (total * factor, weight * factor)

    monkeypatch.setattr(local_step, "accumulate_gradients", wrong)
    found(verified(), "loss", "", "what lies at data 1 (rows 8, 9, 10,", "counts 2 times")


def test_a_wrong_norm(monkeypatch):
    right = local_step.global_norm

    def wrong(gradients, *rest):
        return right({**gradients, "scale": gradients["scale"] * 2**0.5}, *rest)

    monkeypatch.setattr(local_step, "global_norm", wrong)
    result = verified(clip_norm=0.1)
    found(result, "gradient norm", "", "every device holds whole are counted 2 times")


def test_a_wrong_update(monkeypatch):
    right = optax.apply_updates
    monkeypatch.setattr(
        step_file.optax, "apply_updates", lambda params, updates: {**right(params, updates), "scale": params["scale"]}
    )
    monkeypatch.setattr("spmdkit.parallel.oracle.optax", Namespace(optax, apply_updates=right))
    found(verified(), "parameters", "scale", "so it is the update", "the losses agree until step 1")


class Namespace:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self.module, name)


def test_a_collective_that_nobody_predicts(monkeypatch):
    right = local_step.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        again = lax.psum(lax.pcast(summed["scale"], "data", to="varying"), "data") / 2
        return {**summed, "scale": again}, scalars

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    result = verified()
    found(result, "collectives", "", "all-reduce over data: 1 moving 1,536 bytes predicted", "1,664 bytes found")
    assert "NOT as predicted" in str(result)


def test_initial_parameters_that_depend_on_the_mesh(monkeypatch):
    right = step_file.Step.init

    def wrong(step, seed):
        return right(step, seed + 1)

    monkeypatch.setattr(step_file.Step, "init", wrong)
    result = verified()
    found(result, "initial parameters", result.first_difference.where, "The same seed draws other parameters")


def test_a_model_that_is_not_finite_is_the_models_own():
    def broken(params, batch, key):
        total, weight = loss(params, batch, key)
        return total * jnp.nan, weight

    result = verified(replace(MODEL, loss=broken))
    found(result, "loss", "", "It is nan on one device as well")
    json.dumps(result.to_json(), allow_nan=False)


# A model that splits its own work


def split_block_model(size):
    """The toy with its hidden width split over `tensor`; every device returns its share of the loss."""

    def block(params, x, key):
        whole = lax.all_gather(x, "tensor", axis=1, tiled=True)
        partial = jnp.tanh((whole * params["scale"][None, None]) @ params["up"]) @ params["down"]
        return x + lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)

    def own(array):
        length = array.shape[1] // size
        return lax.dynamic_slice_in_dim(array, lax.axis_index("tensor") * length, length, 1)

    def embed(groups, batch, key):
        return groups["embed"]["table"][own(batch["inputs"])]

    def head(groups, x, batch, key):
        return toy.head(groups, x, {name: own(batch[name]) for name in ("targets", "weights")}, key)

    rules = {"blocks/up": (None, None, "tensor"), "blocks/down": (None, "tensor", None)}
    return replace(BLOCK_MODEL, embed=embed, block=block, head=head, rules=rules)


TENSOR_MODEL = replace(BLOCK_MODEL, parallelize=lambda parallel: split_block_model(parallel.tensor.size))


def verified_tensor():
    assert isinstance(TENSOR_MODEL, BlockModel)
    given = [toy.batch(seed, rows=4) for seed in range(2)]
    return verify(TENSOR_MODEL, {"data": 2, "tensor": 2}, given, optimizer=OPTIMIZER, devices=toy.devices(4))


def test_a_missing_sum_over_tensor(monkeypatch):
    """The gradient of a parameter that every device of `tensor` holds is summed over `data` alone."""
    right = local_step.reduce_gradients

    def wrong(gradients, scalars, layouts, axes, dtype):
        summed, scalars = right(gradients, scalars, layouts, axes, dtype)
        blocks = {**summed["blocks"], "scale": lax.psum(gradients["blocks"]["scale"], "data")}
        return {**summed, "blocks": blocks}, scalars

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified_tensor()
    found(result, "gradients", "blocks/scale", "Devices along tensor hold different", "a missing psum over tensor")


@pytest.mark.slow
def test_numbers_of_a_model_that_splits_its_own_work():
    """It predicts none of its own traffic, and that is all that is found."""
    found(verified_tensor(), "collectives", "", "all-gather over tensor: none predicted")


def test_refusals_of_other_kinds_are_not_taken_for_missing_sums():
    assert diagnosis.refused(ValueError("something else"), None) is None


# Pipelines


def verified_pipeline(**options):
    given = [toy.batch(seed, rows=8) for seed in range(2)]
    return verify(BLOCK_MODEL, {"pipe": {"size": 2, **options}}, given, optimizer=OPTIMIZER, devices=toy.devices(2))


@pytest.mark.slow
def test_blocks_that_are_stored_in_another_order():
    """5 blocks on 2 stages of 2 chunks, the second in the opposite order, with places that are filled up."""

    def five(key):
        params = given_init(key)
        return {**params, "blocks": jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf[:2]]), params["blocks"])}

    model = replace(BLOCK_MODEL, init=five, num_blocks=5)
    strategy = {"pipe": {"size": 2, "schedule": "zbv", "microbatches": 2}}
    result = verify(model, strategy, [toy.batch(seed, rows=4) for seed in range(2)], devices=toy.devices(2))
    assert result.ok, str(result)


def test_a_head_that_drops_a_microbatch(monkeypatch):
    """Neither loss nor weight counts it, and no gradient starts from it."""
    right = Stage.head

    def wrong(stage, tick, groups, y):
        total, weight = right(stage, tick, groups, y)
        counts = (tick.entry.microbatch != 1).astype(total.dtype)
        return total * counts, weight * counts

    monkeypatch.setattr(Stage, "head", wrong)
    found(verified_pipeline(), "loss", "", "microbatch 2 of the 4 of every device (rows 2, 3 of 8) is not counted")


@pytest.mark.slow
def test_a_stage_that_drops_a_microbatch(monkeypatch):
    """The loss counts it, but one stage leaves it out of the gradients of its layers."""
    right = Stage.backward_weight

    def wrong(stage, tick, *given):
        entry = tick.entry
        dropped = (entry.microbatch == 2) & (lax.axis_index("pipe") == 0)
        tick.entry = entry._replace(num_blocks=jnp.where(dropped, 0, entry.num_blocks))
        gradients = right(stage, tick, *given)
        tick.entry = entry
        return gradients

    monkeypatch.setattr(Stage, "backward_weight", wrong)
    result = verified_pipeline()
    first = found(
        result, "gradients", result.gradients[0].path,
        "On stage 0 of pipe alone: microbatch 3 of the 4 of every device (rows 4, 5 of 8) is not counted",
    )  # fmt: skip
    assert first.where.startswith("blocks/")
