"""A small model with its verification, and what tests that plant a mistake share."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import FSDPConfig, Model, verify
from spmdkit.parallel.verification.compare import verify_step
from spmdkit.parallel.verification.reference import OneDevice
from support import toy

ROWS, WIDTH, CLASSES = 16, 16, 8
MESH = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=512)}


def init(key):
    """Another matrix for every seed, of operations that compile fast."""
    index = jnp.arange(WIDTH * WIDTH, dtype=jnp.uint32) + jax.random.key_data(key)[-1]
    first = (index * jnp.uint32(2654435761) >> 8).astype(jnp.float32) * 2.0**-24 - 0.5
    return {"first": first.reshape(WIDTH, WIDTH), "scale": jnp.ones(WIDTH), "second": jnp.zeros((WIDTH, CLASSES))}


def loss(params, batch, key):
    hidden = jnp.tanh(batch["inputs"] @ params["first"]) * params["scale"][None]
    return toy.cross_entropy(hidden @ params["second"], batch)


def dropped(params, batch, key):
    """The same with dropout, each row's from its own key."""
    if key is None:
        return loss(params, batch, key)
    return loss(params, {**batch, "inputs": batch["inputs"] * toy.row_masks(batch, key, WIDTH)}, None)


MODEL = Model(init=init, loss=loss)
DROPOUT = Model(init=init, loss=dropped)


def batches(shape=(ROWS, WIDTH), classes=CLASSES, dtype="float32"):
    """Two, whose rows have ragged weights."""
    random, given = np.random.default_rng(0), []
    for _ in range(2):
        rows = toy.labelled(random, *shape, classes=classes, dtype=dtype)
        given.append({**rows, "weights": random.choice([0.25, 0.5, 1.0], len(rows["example"])).astype(dtype)})
    return given


OPTIMIZER = optax.sgd(0.1)


class CompiledOnce(OneDevice):
    """One device, whose first parameters are kept as well."""

    init = cache(OneDevice.init)


@pytest.fixture(autouse=True)
def one_device_is_compiled_once(monkeypatch):
    """For all tests of a model: what they plant is in the strategies."""
    monkeypatch.setitem(verify_step.__globals__, "OneDevice", one_device)


KEPT = {}


def one_device(model, *given, **options):
    """The same object for the same model, which has no hash if it has rules."""
    key = (id(model), *given, *options.items())
    if key not in KEPT:
        KEPT[key] = CompiledOnce(model, *given, **options)
    return KEPT[key]


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


def verified(model=MODEL, strategy=MESH, *, optimizer=OPTIMIZER, check="off", **options):
    """A verification, by default of a model whose contract is known to hold."""
    given = {"optimizer": optimizer, "devices": toy.devices(4), "check": check}
    return verify(model, strategy, batches(), **given, **options)


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
