"""Batches and states that a step cannot take: each one sentence, with what was given, the rule and the remedy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import FSDPConfig, Model
from support import toy


def init(key):
    return {"w": jnp.arange(64.0).reshape(8, 8) / 640}


def loss(params, batch, key):
    """Broadcasts whatever it is given: numbers of rows that differ would train in silence."""
    losses = ((batch["inputs"] @ params["w"]) ** 2).mean(-1) * batch["weights"]
    return losses.sum(), batch["weights"].sum()


MODEL = Model(init=init, loss=loss)
STRATEGY = {"fsdp": FSDPConfig(size=2, floor_bytes=0), "data": 2}


def batch(rows=8):
    return {"inputs": np.ones((rows, 8), np.float32), "weights": np.ones(rows, np.float32)}


ADAM = optax.adam(1e-3)


def make(strategy=STRATEGY, optimizer=ADAM, model=MODEL):
    return toy.build(strategy, optimizer, model)


@pytest.fixture(scope="module")
def step():
    """A step that has run once, and was compiled ahead."""
    step = make()
    step.compile(toy.abstract(batch()))
    step(step.init(0), batch())
    return step


ANY_TIME = {
    "rows": (lambda b: batch(6), "batch of 6 rows cannot be split over data 2 x fsdp 2.*: 6 % 4 = 2"),
    "no rows": (lambda b: batch(0), "batch of 0 rows"),
    "unequal": (lambda b: {**b, "weights": b["weights"][:4]}, "differ in their numbers of rows: inputs 8, weights 4"),
    "one row": (lambda b: {**b, "weights": b["weights"][:1]}, "differ in their numbers of rows: inputs 8, weights 1"),
    "list": (lambda b: {**b, "weights": b["weights"].tolist()}, r"batch\['weights'\] must be an array.*of type list"),
    "scalar": (lambda b: {**b, "weights": np.float32(1)}, r"batch\['weights'\] must be an array.*float32.*np.full"),
    "tuple": (lambda b: (b["inputs"], b["weights"]), "The batch must be a dict of arrays.*got tuple"),
    "empty": (lambda b: {}, "got an empty one"),
}
AFTER_THE_FIRST = {
    "missing": (lambda b: {"inputs": b["inputs"]}, "was compiled for: weights is missing, expected float32 with 1 dim"),
    "new": (lambda b: {**b, "more": b["weights"]}, "more is float32 with 1 dim, expected no such array"),
    "dtype": (lambda b: {**b, "inputs": b["inputs"].astype(int)}, r"inputs is int32 with 2 dim.*expected float32"),
    "rank": (lambda b: {**b, "weights": b["weights"][:, None]}, "weights is float32 with 2 dims, expected .* 1 dim"),
}


@pytest.mark.parametrize(("change", "message"), ANY_TIME.values(), ids=ANY_TIME)
def test_rejects_invalid_batches(change, message):
    fresh = make()
    with pytest.raises(UserError, match=message):
        fresh(fresh.init(0), change(batch()))


@pytest.mark.parametrize(("change", "message"), [*ANY_TIME.values(), *AFTER_THE_FIRST.values()])
def test_rejects_changed_batches(step, change, message):
    compiled, state = dict(step._compiled), step.init(0)
    with pytest.raises(UserError, match=message):
        step(state, change(batch()))
    assert step._compiled == compiled  # a mistake costs no compilation
    step(state, batch())  # nor the state


@pytest.mark.parametrize("call", ["evaluate", "gradients"])
def test_batches_for_evaluation_and_gradients(step, call):
    state = step.init(0)
    run = (lambda b: step.evaluate(state.params, b)) if call == "evaluate" else (lambda b: step.gradients(state, b))
    run(batch())
    rows = "evaluation batch of 6 rows.*data 2 x fsdp 2: 6 % 4 = 2. Pad it to a multiple of 4"
    for change, message in {**ANY_TIME, **AFTER_THE_FIRST}.values():
        given = change(batch())
        if call == "evaluate" and isinstance(given, dict) and message.startswith("batch of"):
            message = rows if message.startswith("batch of 6") else "evaluation batch of 0 rows"
        with pytest.raises(UserError, match=message):
            run(given)
    run(batch(12))  # other numbers of rows are other programs


def test_a_first_mistake_is_not_what_is_expected_from_then_on():
    def reads(params, batch, key):
        return (batch["inputs"] @ params["w"]).sum() * batch["weights"].sum(), batch["scale"].sum()

    model = Model(init=init, loss=reads)
    fresh = make(model=model)
    with pytest.raises(Exception, match="scale"):
        fresh(fresh.init(0), batch())
    fresh(fresh.init(0), {**batch(), "scale": batch()["weights"]})


def test_rejects_consumed_states(step):
    """On a mesh the devices would otherwise wait for each other until XLA aborts the process."""
    state = step.init(0)
    step(state, batch())
    for run in (
        lambda: step(state, batch()),
        lambda: step.gradients(state, batch()),
        lambda: step.evaluate(state.params, batch()),
        lambda: step.evaluate({"w": state.params["w"]}, batch()),
    ):
        with pytest.raises(UserError, match=r"was consumed by an earlier step.*state, metrics = step"):
            run()


def other_model():
    return Model(init=lambda key: {"v": jnp.zeros((8, 8))}, loss=lambda p, b, key: (p["v"].sum(), 1.0))


STATES = {
    "not taken apart": (
        lambda s: (s.init(0), None),
        "must be a TrainState, got a value of type tuple.*state, metrics = step",
    ),
    "parameters": (lambda s: s.init(0).params, "must be a TrainState, got a value of type dict.*step.init"),
    "optimizer": (lambda s: make(optimizer=optax.sgd(0.1)).init(0), "'opt_state/0/count' is missing, expected int32"),
    "more optimizer": (
        lambda s: make(optimizer=optax.chain(optax.scale_by_adam(), optax.scale(-1.0), optax.trace(0.9))).init(0),
        r"'opt_state/2/trace/w' is float32\[8, 8\] .*, expected missing",
    ),
    "model": (lambda s: make(model=other_model()).init(0), r"'params/w' is missing, expected float32\[8, 8\]"),
    "shape": (
        lambda s: s.init(0)._replace(params={"w": jnp.zeros((8, 4))}),
        r"'params/w' is float32\[8, 4\], expected float32\[8, 8\]",
    ),
    "mesh": (
        lambda s: make({"fsdp": FSDPConfig(size=4, floor_bytes=0)}).init(0),
        r"'params/w' is .* on 4 devices \(fsdp=4\) as .*, expected .* \(data=2, fsdp=2\) as .*jax.device_put\(state",
    ),
    "devices": (lambda s: make({"data": 2}).init(0), r"'step' is .* on 2 devices.*expected .* on 4 devices"),
}


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize(("given", "message"), STATES.values(), ids=STATES)
def test_states_of_something_else(step, given, message, compiled):
    other = step if compiled else make()
    with pytest.raises(UserError, match=message):
        other(given(other), batch())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda s: s.init(0), "Expected parameters, got a whole state. Pass state.params."),
        (lambda s: {"v": np.zeros((8, 8))}, r"'w' is missing, expected float32\[8, 8\]"),
        (lambda s: make({"data": 2}).init(0).params, "'w' is .* on 2 devices.*expected .* on 4 devices"),
    ],
)
def test_parameters_of_something_else(step, given, message):
    with pytest.raises(UserError, match=message):
        step.evaluate(given(step), batch())


def test_a_pipeline_checks_its_microbatches():
    piped = make({"pipe": {"size": 3, "microbatches": 4}}, model=toy.BLOCK_MODEL)
    with pytest.raises(UserError, match=r"strategy.pipe.microbatches 4 .*6 % 4 = 2"):
        piped(piped.init(0), toy.batch(0, rows=6))


def test_keeps_errors_of_the_model():
    def broken(params, batch, key):
        raise RuntimeError("mine")

    fresh = make(model=Model(init=init, loss=broken))
    with pytest.raises(RuntimeError, match="mine"):
        fresh(fresh.init(0), batch())


def test_an_array_that_the_loss_reads_and_the_batch_does_not_hold():
    """The error stays, as another mapping of the model's may lack the key, and says what the batch holds."""
    step = make(model=Model(init=init, loss=lambda params, batch, key: (batch["mask"].sum(), 1.0)))
    with pytest.raises(KeyError, match="mask") as caught:
        step(step.init(0), batch())
    assert (
        caught.value.__notes__[-1] == "The batch does not contain 'mask', only inputs, weights. Did you mean 'weights'?"
    )
