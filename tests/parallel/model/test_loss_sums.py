"""The results that a loss may return, and the errors for others."""

import jax
import jax.numpy as jnp
import pytest
from spmdkit.parallel.model.loss_sums import NotSums, as_sums, state_problem

ONE, TWO = jnp.float32(1), jnp.float32(2)


def test_accepts_a_pair():
    found = as_sums((jnp.float16(3), 4))
    assert (float(found.total), float(found.weight), found.metrics, found.state) == (3.0, 4.0, {}, ())
    assert found.total.dtype == found.weight.dtype == jnp.float32


def test_metrics_get_their_whole_names_and_at_least_float32():
    found = as_sums((ONE, TWO, {"accuracy": (jnp.bfloat16(3), 4), "parts": {"loss": (ONE, TWO)}}))
    assert {name: (float(total), float(weight)) for name, (total, weight) in found.metrics.items()} == {
        "accuracy": (3.0, 4.0),
        "parts/loss": (1.0, 2.0),
    }
    assert found.metrics["accuracy"][0].dtype == jnp.float32


def test_sums_are_as_wide_as_gradients(float64):
    found = as_sums((ONE, TWO, {"accuracy": (ONE, TWO)}), "float64")
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float64")}
    assert as_sums((jnp.bfloat16(1), TWO), "bfloat16").total.dtype == jnp.float32


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (ONE, r"returns 1 value, float32 \(\)\. It must return a pair of floating-point scalars"),
        (None, "returns None. It must return a pair"),
        ({"loss": ONE, "weight": ONE}, r"returns a dict of 2 values, float32 \(\), float32 \(\)\. It must"),
        ((ONE, jnp.ones(2)), r"returns 2 values, float32 \(\), float32 \(2,\)\. It must"),
        ((jnp.int32(1), TWO), "returns a sum of dtype int32, which is not differentiable"),
        ((ONE, TWO, ONE), r"returns metrics that are 1 value, float32 \(\), not a dict of pairs"),
        ((ONE, TWO, {"accuracy": ONE}), "returns the metric 'accuracy' as 1 value.* for a mean over n rows, "),
        ((ONE, TWO, {"a": {"b": (ONE, jnp.ones(3))}}), "returns the metric 'a/b' as 2 values"),
        ((ONE, TWO, {"a": (jnp.complex64(1), TWO)}), "returns the metric 'a' as 2 values, complex64"),
        ((ONE, TWO, {"loss": (ONE, TWO)}), "returns a metric named 'loss', which a run logs itself"),
        ((ONE, TWO, {}, {}, {}), "returns 2 values"),
    ],
)
def test_rejects_other_results(result, message):
    with pytest.raises(NotSums, match=f"The model's loss {message}"):
        as_sums(result)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"mean": jnp.ones(3)}, "in which 'count' is missing, expected of shape ()"),
        ({"mean": jnp.ones(3), "count": ONE, "more": ONE}, "in which 'more' is of shape (), expected missing"),
        ({"mean": jnp.ones(2), "count": ONE}, "in which 'mean' is of shape (2,), expected of shape (3,)"),
        ({"mean": jnp.ones(3), "count": TWO}, "None"),
    ],
)
def test_rejects_incomplete_states(found, message):
    assert message in str(state_problem(found, {"mean": jnp.zeros(3), "count": jnp.int32(0)}))
