"""`check_model`: what it is given is looked at first, then the model is traced, then its contract is measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.keys import make_key
from spmdkit.parallel import Model
from spmdkit.parallel.verification.contract import check as file
from spmdkit.parallel.verification.contract.breaches import Breach, ContractError, NotChecked
from spmdkit.parallel.verification.contract.check import check_model, initial_params, report

BATCH = {"inputs": np.ones((4, 3), np.float32), "weights": np.ones(4, np.float32)}
BROKEN = (Breach("rows", "its rows depend."), Breach("mean", "it is a mean."))


def init(key):
    return {"w": jax.random.normal(key, (3,), jnp.float32)}


def loss(params, batch, key):
    return (batch["weights"] * (batch["inputs"] @ params["w"])).sum(), batch["weights"].sum()


def mean(params, batch, key):
    return (batch["weights"] * (batch["inputs"] @ params["w"])).mean(), jnp.float32(1)


MODEL, MEAN = Model(init=init, loss=loss, name="mine"), Model(init=init, loss=mean, name="mine")


@pytest.fixture
def measured(monkeypatch):
    """What is measured, without measuring: the arguments, in order."""
    given = []
    monkeypatch.setattr(file, "breaches", lambda *arguments: given.append(arguments) or ())
    return given


def test_a_right_model_breaks_nothing():
    assert check_model(MODEL, BATCH) == ()


def test_a_breach_is_an_error_a_warning_or_not_looked_for():
    with pytest.raises(ContractError, match=r"model 'mine' breaks the contract \(mean\): its loss returns a mean"):
        check_model(MEAN, BATCH)
    with pytest.warns(UserWarning, match="breaks the contract"):
        (breach,) = check_model(MEAN, BATCH, check="warn")
    assert breach.kind == "mean"
    assert check_model(MEAN, BATCH, check="off") == ()


def test_off_traces_the_functions_all_the_same(measured):
    assert check_model(MODEL, BATCH, check="off") == ()
    assert measured == []
    wrong = Model(init=init, loss=lambda params, batch, key: batch["inputs"] @ params["absent"])
    with pytest.raises(UserError, match="absent"):
        check_model(wrong, BATCH, check="off")


@pytest.mark.parametrize(
    ("batch", "check", "text"),
    [
        (BATCH, "loud", "check='loud' is not one of error, warn, off."),
        ({**BATCH, "weights": np.ones(3)}, "error", r"these have \{'inputs': 4, 'weights': 3\}"),
        ({**BATCH, "rate": np.float32(1)}, "error", "'rate': 'no dim'"),
    ],
)
def test_what_it_is_given_is_looked_at(batch, check, text):
    with pytest.raises(UserError, match=text):
        check_model(MODEL, batch, check=check)


def test_the_index_of_each_row_is_added_and_a_given_one_kept(measured):
    check_model(MODEL, BATCH)
    check_model(MODEL, {**BATCH, "example": np.arange(7, 11)})
    assert [arguments[2]["example"].tolist() for arguments in measured] == [[0, 1, 2, 3], [7, 8, 9, 10]]


def test_wide_whole_numbers_are_traced_as_the_runtime_gives_them(measured):
    seen = []

    def recording(params, batch, key):
        seen.append(str(batch["targets"].dtype))
        return loss(params, batch, key)

    check_model(Model(init=init, loss=recording), {**BATCH, "targets": np.zeros(4, np.int64)}, check="off")
    assert set(seen) == {"int32"}


def test_parameters_are_those_given_or_drawn_by_the_seed(measured):
    given = {"w": np.ones(3)}
    check_model(MODEL, BATCH, params=given)
    check_model(MODEL, BATCH, seed=0)
    check_model(MODEL, BATCH, seed=1)
    first, drawn, other = (arguments[1]["w"] for arguments in measured)
    assert first is given["w"]
    assert not np.array_equal(drawn, other)
    keys = [jax.random.key_data(arguments[3]).tolist() for arguments in measured]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0] == jax.random.key_data(jax.random.fold_in(make_key(0), 0)).tolist(), "as in the first step"


def test_too_large_a_model_is_the_users_own_matter(monkeypatch):
    def too_large(*given):
        raise NotChecked("4 rows on one device need 3.0 GiB")

    monkeypatch.setattr(file, "breaches", too_large)
    with pytest.raises(UserError, match=r"model 'mine': 4 rows on one device need 3.0 GiB. Give a smaller model"):
        check_model(MODEL, BATCH)


def test_first_parameters_are_in_float32(float64):
    model = Model(init=lambda key: {"w": jnp.ones(3, "float64"), "n": jnp.arange(2)}, loss=loss)
    found = initial_params(model, jax.random.key(0))
    assert (found["w"].dtype, found["n"].dtype) == (jnp.float32, jnp.int64)


def test_all_breaches_are_reported_at_once():
    with pytest.raises(ContractError) as raised:
        report("model.name='mine'", BROKEN, "error")
    assert str(raised.value) == (
        "model.name='mine' breaks the contract (rows): its rows depend.\n"
        "model.name='mine' breaks the contract (mean): it is a mean. "
        "To train it as it is, set model.check: warn, or off."
    )
    report("x", BROKEN, "off")
    report("x", (), "error")
