"""Causality: leaks of later tokens are found, causal models pass, and other batches are skipped."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import verify
from spmdkit.parallel.verification.causality import look_ahead, may_look_ahead
from spmdkit.parallel.verification.contract.breaches import breaches, initial_params
from support import toy

ROWS, LENGTH, VOCABULARY = 3, 8, 11
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))


def language(packed=False):
    """Rows whose targets are the next tokens; packed ones have no weight where a document ends."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    weights = random.choice([0.5, 1.0], (ROWS, LENGTH))
    if packed:
        weights[:, 3] = 0
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def losses_of(mix):
    """A loss whose hidden states are tokens' rows of a table, mixed over positions by a matrix."""

    def loss(batch):
        hidden = np.einsum("qp,bpv->bqv", mix, TABLE[batch["inputs"]])
        scores = hidden - np.log(np.exp(hidden).sum(-1, keepdims=True))
        each = -np.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
        return float((each * batch["weights"]).sum())

    return loss


CAUSAL = np.tril(np.ones((LENGTH, LENGTH))) / LENGTH
SEEING = {
    "all": np.ones((LENGTH, LENGTH)) / LENGTH,
    "the next": np.tril(np.ones((LENGTH, LENGTH)), 1) / LENGTH,
    "its chunk of 4": np.kron(np.eye(2), np.ones((4, 4))) / 4,
    "the last, from the first": CAUSAL + np.eye(1, LENGTH, LENGTH - 1) * np.eye(LENGTH, 1),
}


@pytest.mark.parametrize("packed", [False, True])
def test_accepts_causal_model(packed):
    result = look_ahead(losses_of(CAUSAL), language(packed), 1e-9)
    assert (result.seen, result.shared, result.untried) == (None, False, "")
    assert result.positions == tuple(range(LENGTH - 1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("who", SEEING)
def test_finds_leak_of_later_tokens(who, packed):
    result = look_ahead(losses_of(SEEING[who]), language(packed), 1e-9)
    assert result.seen is not None
    assert result.seen[1] > 1e-3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mix", [CAUSAL, *SEEING.values()], ids=["causal", *SEEING])
def test_one_trial_selects_the_models_to_look_at(mix, packed):
    calls = []
    loss = losses_of(mix)

    def counted(batch):
        calls.append(batch)
        return loss(batch)

    assert may_look_ahead(counted, language(packed), 1e-9) == (mix is not CAUSAL)
    assert len(calls) == 2
    assert not may_look_ahead(counted, {**language(), "targets": language()["inputs"]}, 1e-9)


def test_reports_the_largest_leak():
    mix = CAUSAL.copy()
    mix[1, 2], mix[3, 4], mix[6, 7] = 0.01, 0.5, 0.01
    seen = look_ahead(losses_of(mix), language(), 1e-9).seen
    assert seen is not None
    assert seen[0] == 3


@pytest.mark.parametrize("mix", [CAUSAL, SEEING["the next"]], ids=["causal", "seeing"])
def test_separates_leak_from_term_shared_by_row(mix):
    """Such as a router's loss, which counts every position of a row."""
    own = losses_of(mix)

    def loss(batch):
        shared = TABLE[batch["inputs"]].mean(axis=(1, 2))
        return own(batch) + float((shared * batch["weights"].sum(axis=1)).sum())

    result = look_ahead(loss, language(), 1e-9)
    assert (result.seen is None) == (mix is CAUSAL)
    assert result.shared or result.seen


def test_skips_other_batches():
    batch = language()
    both_ways = losses_of(SEEING["all"])
    hidden = {**batch, "targets": batch["inputs"]}
    assert "not the inputs shifted by one" in look_ahead(both_ways, hidden, 1e-9).untried
    rows = {"inputs": np.ones((ROWS, 4)), "targets": np.ones(ROWS, np.int32), "weights": np.ones(ROWS)}
    assert "lacks inputs, targets and weights" in look_ahead(both_ways, rows, 1e-9).untried
    own = look_ahead(lambda batch: float((TABLE[batch["inputs"]].sum(-1) * batch["weights"]).sum()), batch, 1e-9)
    assert own.untried == "the loss does not read the targets"


def looking(ahead):
    """The toy with a mean over positions in each block: of earlier ones, or with one more."""
    mix = np.tril(np.ones((toy.LENGTH, toy.LENGTH)), ahead) / toy.LENGTH

    def block(params, x, key):
        return toy.block(params, x + jnp.einsum("qp,bpd->bqd", jnp.asarray(mix, x.dtype), x), key)

    return replace(toy.BLOCK_MODEL, block=block)


def next_tokens(seed):
    tokens = np.random.default_rng(seed).integers(0, toy.VOCABULARY, (4, toy.LENGTH + 1)).astype(np.int32)
    return {**toy.batch(seed, rows=4), "inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize("ahead", [0, 1, toy.LENGTH])
def test_contract_finds_later_tokens(ahead):
    model = looking(ahead)
    broken = breaches(model, initial_params(model, jax.random.key(0)), next_tokens(0), jax.random.key(1))
    assert [breach.kind for breach in broken] == ["future"] * (ahead > 0)
    if broken:
        assert "it sees later tokens. The targets are the inputs, shifted by one." in broken[0].message


def verified(ahead):
    options = {"optimizer": optax.adamw(1e-3), "devices": toy.devices(2)}
    return verify(looking(ahead), {"data": 2}, [next_tokens(seed) for seed in range(2)], **options)


@pytest.mark.slow
def test_verify_rejects_model_that_sees_next_token():
    result = verified(1)
    first = result.first_difference
    assert first is not None
    assert first.what == "the model sees later tokens"
    assert "the model sees later tokens" in first.hint
    assert "WRONG on one device already: the model sees later tokens\n" in str(result)
    assert "DIFFERENT from one device" not in str(result)
    assert result.to_json()["future"]["seen"][0] in result.future.positions
    assert "DIFFERS" in next(line for line in str(result).splitlines() if line.startswith("loss with other later"))
