"""The rows that a contract is judged by, how parameters are moved for it, and the sums in all arrangements."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import Model
from spmdkit.parallel.verification.contract import probe as file
from spmdkit.parallel.verification.contract.probe import (
    ROWS,
    NotChecked,
    Pair,
    Pairs,
    Probe,
    compile_quickly,
    count,
    first_rows,
    moved,
    nudged,
    part,
    quick_compilation,
)

INPUTS = np.arange(1.0, ROWS + 1, dtype=np.float32)
BATCH = {"inputs": INPUTS, "weights": np.array([1.0, 0.5, 0.75, 0.25], np.float32), "n": np.arange(ROWS)}


def loss(params, batch, key):
    """Counts the row's place in the batch, so that the arrangements differ."""
    place = jnp.arange(len(batch["inputs"]), dtype=batch["inputs"].dtype)
    return (batch["weights"] * (batch["inputs"] * params["w"] + 10 * place)).sum(), batch["weights"].sum()


MODEL = Model(init=lambda key: {"w": jnp.ones(())}, loss=loss)
PARAMS = {"w": np.float32(2.0)}


def pair_of(rows, weights=None):
    weights = BATCH["weights"][rows] if weights is None else weights
    return Pair(float(weights @ (2 * INPUTS[rows] + 10 * np.arange(len(rows)))), float(weights.sum()))


def test_sums_of_each_arrangement():
    found = Probe(MODEL, "float32").sums(PARAMS, BATCH, None)
    assert found == Pairs(
        whole=pair_of([0, 1, 2, 3]),
        first=pair_of([0, 1]),
        second=pair_of([2, 3]),
        shuffled=pair_of([2, 0, 3, 1]),
        unweighted=Pair(0, 0),
    )
    assert found.halves == pair_of([0, 1]).plus(pair_of([2, 3]))


def test_without_weights_there_is_nothing_to_put_at_zero():
    model = replace(MODEL, loss=lambda params, batch, key: (batch["inputs"].sum() * params["w"], jnp.float32(1)))
    assert Probe(model, "float32").sums(PARAMS, {"inputs": INPUTS}, None).unweighted is None


def test_each_number_of_rows_is_compiled_once(monkeypatch):
    compiled, right = [], file.compile_quickly
    monkeypatch.setattr(file, "compile_quickly", lambda *given: compiled.append(given) or right(*given))
    probe = Probe(MODEL, "float32")
    for _ in range(2):
        probe.sums(PARAMS, BATCH, None)
    assert len(compiled) == 2


def test_whether_anything_moves():
    """The leaf that is read last is looked at first, and all of them where its gradient is zero."""

    def of(**factors):
        def loss(params, batch, key):
            first, last = (jax.lax.stop_gradient(params[n]) * (1 - f) + params[n] * f for n, f in factors.items())
            return (batch["inputs"] * first + last).sum(), jnp.float32(ROWS)

        params = {name: np.float32(1) for name in factors}
        return Probe(Model(init=lambda key: params, loss=loss), "float32").moves(params, BATCH, None)

    for factors, expected in (({"a": 1, "b": 1}, True), ({"a": 1, "b": 0}, True), ({"a": 0, "b": 0}, False)):
        found, moves = of(**factors)
        assert (found, moves) == (Pair(14, 4), expected)


def test_in_float64_floats_are_wide_and_whole_numbers_as_the_runtime_gives_them():
    seen = {}

    def recording(params, batch, key):
        seen.update({name: str(array.dtype) for name, array in batch.items()})
        return loss(params, batch, key)

    Probe(replace(MODEL, loss=recording), "float64").pair({"w": np.float64(2)}, BATCH, None)
    assert seen == {"inputs": "float64", "weights": "float64", "n": "int32"}
    assert not jax.config.jax_enable_x64


def test_rounding_is_that_of_the_narrowest_arrays():
    narrow = replace(MODEL, loss=lambda params, batch, key: loss(params, {**batch, "inputs": rounded(batch)}, key))

    def rounded(batch):
        return jax.jit(lambda x: x.astype("bfloat16").astype(x.dtype))(batch["inputs"])

    assert Probe(MODEL, "float32").rounding(PARAMS, BATCH, None) == 2.0**-24
    assert Probe(MODEL, "float64").rounding({"w": np.float64(2)}, BATCH, None) == 2.0**-53
    assert Probe(narrow, "float32").rounding(PARAMS, BATCH, None) == 2.0**-8


def test_what_needs_too_much_memory_is_not_checked(monkeypatch):
    monkeypatch.setattr(file, "MOST_TEMPORARY_BYTES", -1)
    with pytest.raises(NotChecked, match=r"^4 rows on one device need 0.0 GiB$"):
        Probe(MODEL, "float32").sums(PARAMS, BATCH, None)


def test_the_first_rows_that_have_weight_are_taken_with_ragged_weights():
    weights = np.array([0, 2, 0, 4, 8, 16, 32], np.float32)
    found = first_rows({"n": np.arange(7), "weights": weights})
    assert found["n"].tolist() == [1, 3, 4, 5]
    assert found["weights"].tolist() == [2, 2, 6, 4]
    assert found["weights"].dtype == np.float32
    of_tokens = first_rows({"n": np.arange(7), "weights": np.stack([weights, 0 * weights], axis=1)})
    assert of_tokens["n"].tolist() == [1, 3, 4, 5]
    assert of_tokens["weights"][:, 0].tolist() == [2, 2, 6, 4]


def test_few_rows_are_repeated_and_none_is_none():
    assert first_rows({"n": np.arange(3)})["n"].tolist() == [0, 1, 2, 0]
    assert count(first_rows({"n": np.arange(99)}, most=64)) == 64
    assert first_rows({"n": np.arange(3), "weights": np.zeros(3)}) is None
    counts = first_rows({"weights": np.full(4, 2)})["weights"]
    assert counts.tolist() == [2, 2, 2, 2], "whole numbers stay"


def test_a_part_of_a_batch():
    assert part(BATCH, [3, 1])["n"].tolist() == [3, 1]
    assert part(BATCH, slice(2))["inputs"].tolist() == [1, 2]


def test_parameters_are_moved_off_zero_and_one():
    given = {"ones": np.ones(50, np.float32), "zeros": np.zeros(50, np.float32), "n": np.arange(3)}
    found = moved(given)
    assert 0 < np.abs(found["ones"] - 1).max() <= 0.1
    assert ((found["zeros"] >= 0.05) & (found["zeros"] <= 0.15)).all()
    assert len(np.unique(found["zeros"])) == 50
    assert found["n"] is given["n"]
    assert found["ones"].dtype == np.float32


def test_nudged_parameters_stay_at_zero_and_near():
    found = nudged({"x": np.array([0.0, 1.0, -5.0])}, 1e-3)["x"]
    assert found[0] == 0
    assert 0 < abs(found[1] - 1) <= 1e-3
    assert 0 < abs(found[2] + 5) <= 5e-3


def test_quick_compilation_ends_as_it_began():
    name = "jax_disable_most_optimizations"
    jax.config.update(name, False)
    try:
        with quick_compilation():
            assert jax.config.read(name)
        assert not jax.config.read(name)
        with pytest.raises(ZeroDivisionError):
            compile_quickly(lambda x: 1 // 0, jnp.float32(0))
        assert not jax.config.read(name)
    finally:
        jax.config.update(name, True)
    assert float(compile_quickly(lambda x: 2 * x, jnp.float32(0))(jnp.float32(4))) == 8


def test_a_pair_in_words():
    assert str(Pair(1234567.0, 0.5)) == "(1.23457e+06, 0.5)"
    assert not Pair(float("nan"), 1.0).is_finite
    assert Pair(1.0, 2.0).is_finite
