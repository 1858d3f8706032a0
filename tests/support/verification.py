"""A small model with its verification, tests that plant a mistake, and a verification in which everything agrees."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import FSDPConfig, Model, verify
from spmdkit.parallel.verification.causality import Future
from spmdkit.parallel.verification.collective_check import CollectiveCheck
from spmdkit.parallel.verification.differences import LeafError
from spmdkit.parallel.verification.perturb import prepared
from spmdkit.parallel.verification.reference import OneDevice, Reference
from spmdkit.parallel.verification.result import Verification
from spmdkit.parallel.verification.round_trip import RoundTrip
from spmdkit.parallel.xla.census import Collective
from support import toy

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


def dropped(params, batch, key):
    """The same with dropout, each row's from its own key."""
    if key is None:
        return loss(params, batch, key)
    keys = jax.vmap(lambda example: jax.random.fold_in(key, example))(batch["example"])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (WIDTH,)))(keys)
    return loss(params, {**batch, "inputs": batch["inputs"] * keep}, None)


MODEL = Model(init=init, loss=loss)
DROPOUT = Model(init=init, loss=dropped)


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


def five(key):
    """Five blocks, for 2 stages of 2 chunks, the second in the opposite order: the stages pad two slots."""
    params = given_init(key)
    return {**params, "blocks": jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf[:2]]), params["blocks"])}


BLOCK_MODEL = replace(toy.BLOCK_MODEL, init=given_init)
FIVE_BLOCKS = replace(toy.BLOCK_MODEL, init=five, num_blocks=5)


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


class Namespace:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self.module, name)


MOVED = (Collective("all-reduce", ("data",), 2, 1536),)
AGREES = Verification(
    mesh={"data": 2, "fsdp": 1},
    dtype="float64",
    steps=2,
    tolerance=1e-9,
    params_tolerance=1e-8,
    init_tolerance=1e-5,
    init_rel=0.0,
    loss_rel=1e-16,
    weight_rel=0.0,
    gradients=(LeafError(2e-15, "second"), LeafError(1e-15, "first")),
    grad_norm_rel=3e-16,
    params=(LeafError(4e-15, "second"), LeafError(0.0, "first")),
    optimizer=(LeafError(5e-15, "0/mu/second"), LeafError(0.0, "0/mu/first")),
    reported=(6e-16, "loss of step 1"),
    losses=(2.0, 1.5),
    reference_losses=(2.0, 1.5),
    collectives=CollectiveCheck(predicted=MOVED, found=MOVED),
    first_difference=None,
)
TRIP = RoundTrip(mesh={"fsdp": 2}, arrays=7, params=(LeafError(1e-15, "first"),), differing=(), next_step=0.0)
BEYOND = replace(AGREES, evaluation_rel=1e-16, round_trip=TRIP, future=Future(positions=(0, 3, 6)))
"""The same where what is beyond the steps was looked at."""


def reference(**changed):
    """Two steps on one device."""
    arrays = {"first": np.array([1.0, 2.0]), "second": np.array([[3.0]])}
    given = {
        "losses": (2.0, 1.5),
        "weights": (8.0, 8.0),
        "norms": (0.5, 0.25),
        "gradients": arrays,
        "params": {path: 2 * leaf for path, leaf in arrays.items()},
        "opt_state": (),
    }
    return Reference(**{**given, **changed})
