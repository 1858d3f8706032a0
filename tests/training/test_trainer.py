"""`Trainer`: the same numbers on every mesh, whatever form the data has, and nothing that `fit` does not do."""

import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.data.source import Splits
from spmdkit.data.sources.arrays import ArraySource
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import Model
from spmdkit.training.trainer import Trainer

import spmdkit

ROWS, FEATURES, CLASSES = 1003, 6, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = (X[:, :CLASSES].argmax(1)).astype(np.int32)
FSDP = {"fsdp": {"size": 8, "floor_bytes": 1}}


def init(key):
    return {"kernel": jax.random.normal(key, (FEATURES, 8)), "out": jnp.ones((8, CLASSES)) / 4}


def logits(params, batch):
    return jnp.tanh(batch["inputs"] @ params["kernel"]) @ params["out"]


def loss(params, batch, key):
    found, weights = logits(params, batch), batch["weights"]
    losses = optax.softmax_cross_entropy_with_integer_labels(found, batch["targets"])
    hits = (found.argmax(-1) == batch["targets"]) * weights
    return (losses * weights).sum(), weights.sum(), {"accuracy": (hits.sum(), weights.sum())}


def trainer(strategy=None, **options):
    model = Model(init=init, loss=loss, predict=logits, name="m")
    return Trainer(model, optax.adam(1e-2), FSDP if strategy is None else strategy, **options)


def by_hand(params):
    """All rows at once, in NumPy."""
    found = np.tanh(X.astype(np.float64) @ np.asarray(params["kernel"], np.float64)) @ np.asarray(params["out"])
    log_p = found - np.log(np.exp(found).sum(1, keepdims=True))
    return found, -log_p[np.arange(ROWS), Y].mean(), (found.argmax(1) == Y).mean()


@pytest.mark.slow
def test_all_rows_count_once_on_eight_devices():
    """1,003 rows in batches of 64: the last one is filled up, and what fills it counts nothing."""
    made = trainer()
    assert made.fit((X, Y), steps=5, say=lambda line: None).steps == made.steps == 5
    found, mean, right = by_hand(made.params)
    scores = made.evaluate({"inputs": X, "targets": Y})
    assert scores["loss"] == pytest.approx(mean, rel=1e-6)
    assert scores["accuracy"] == pytest.approx(right, abs=1e-12)
    predicted = made.predict({"inputs": X})
    assert predicted.shape == (ROWS, CLASSES)
    np.testing.assert_allclose(predicted, found, rtol=1e-4, atol=1e-5)
    one = trainer(spmdkit.DeviceMesh.simulated(1), params=jax.tree.map(np.asarray, made.params))
    assert one.evaluate((X, Y)) == pytest.approx(scores, rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_stages_that_store_blocks_in_another_order():
    from spmdkit.models import TransformerConfig, transformer

    model = transformer(TransformerConfig(vocabulary=16, length=8, layers=4, width=16, heads=2))
    stages = {"size": 2, "schedule": "interleaved_1f1b", "virtual": 2, "microbatches": 4}
    tokens = RANDOM.integers(0, 16, (70, 9)).astype(np.int32)
    rows = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    staged, whole = (
        Trainer(model, optax.sgd(0.1), each, global_batch=32) for each in ({"pipe": stages, "data": 4}, {"data": 8})
    )
    assert staged.evaluate(rows) == pytest.approx(whole.evaluate(rows), rel=1e-5)
    np.testing.assert_allclose(staged.predict(rows), whole.predict(rows), rtol=1e-4, atol=1e-5)
    assert staged.predict(rows).shape == (70, 8, 16)


FORMS = {
    "pair": lambda x, y: (x, y),
    "source": lambda x, y: ArraySource({"inputs": x, "targets": y}),
    "batches": lambda x, y: [(x[at : at + 100], y[at : at + 100]) for at in range(0, len(x), 100)],
    "iterator": lambda x, y: iter(
        [{"inputs": x[:1000], "targets": y[:1000]}, {"inputs": x[1000:], "targets": y[1000:]}]
    ),
    "splits": lambda x, y: Splits(ArraySource({"inputs": x[:9]}), ArraySource({"inputs": x, "targets": y}), None, ""),
}


@pytest.mark.slow
def test_every_form_of_data():
    made = trainer()
    expected, predicted = made.evaluate({"inputs": X, "targets": Y}), made.predict({"inputs": X})
    for name, form in FORMS.items():
        assert made.evaluate(form(X, Y)) == pytest.approx(expected, rel=1e-6), name
        np.testing.assert_array_equal(made.predict(form(X, Y)), predicted, err_msg=name)


@pytest.mark.slow
def test_it_goes_on_where_it_was():
    """Two calls are one call of as many steps, bit for bit; a predictor of old parameters is not kept."""
    whole, halves, quiet = trainer(), trainer(), {"say": lambda line: None}
    before = halves.predict((X, Y))
    whole.fit((X, Y), steps=6, **quiet)
    halves.fit((X, Y), steps=3, **quiet)
    halves.fit((X, Y), steps=3, **quiet)
    jax.tree.map(np.testing.assert_array_equal, whole.params, halves.params)
    assert not np.array_equal(halves.predict((X, Y)), before)


def test_a_state_that_is_given_is_predicted_with():
    made, rows = trainer({"data": 8}), (X[:8], Y[:8])
    before = made.predict(rows)
    given = made.state
    made.state = given._replace(params=jax.tree.map(lambda leaf: 2 * leaf, given.params))
    np.testing.assert_allclose(made.predict(rows), by_hand(made.params)[0][:8], rtol=1e-4, atol=1e-5)
    made.state = given
    np.testing.assert_array_equal(made.predict(rows), before)


@pytest.mark.slow
def test_epochs_evaluations_and_callbacks():
    class Ends(spmdkit.Callback):
        def __init__(self):
            self.seen, self.epochs = [], []

        def on_epoch_end(self, run, epoch):
            self.epochs.append((run.step, epoch))

        def on_evaluation_end(self, run, metrics):
            self.seen.append(metrics["eval_accuracy"])
            if len(self.seen) == 2:
                run.stop("enough")

    ends, made = Ends(), trainer()
    fitted = made.fit((X, Y), epochs=4, evaluation=(X[:100], Y[:100]), evaluate_every=20, callbacks=[ends], log_every=5)
    assert (fitted.why, fitted.steps, made.steps) == ("enough", 40, 40)
    assert ends.epochs == [(16, 0), (32, 1)], "the steps that hold the last row: 1003 / 64 = 15.7, 2006 / 64 = 31.3"
    assert fitted.records[-1]["eval_accuracy"] == ends.seen[-1] == made.evaluate((X[:100], Y[:100]))["accuracy"]
    assert fitted.records[-1]["loss"] < fitted.records[0]["loss"]


def test_epochs_end_with_a_whole_step():
    """3 x 40 rows in batches of 16: 7.5 steps."""
    assert trainer({"data": 8}, global_batch=16).fit((X[:40], Y[:40]), epochs=3, say=lambda line: None).steps == 8


@pytest.mark.slow
def test_batches_one_after_the_other_are_trained_on():
    whole, streamed = trainer(), trainer()
    whole.fit((X[:192], Y[:192]), steps=3, shuffle=False)
    streamed.fit(({"inputs": X[at : at + 48], "targets": Y[at : at + 48]} for at in range(0, 192, 48)), steps=3)
    jax.tree.map(np.testing.assert_array_equal, whole.params, streamed.params)


def next_of(batches, number):
    return next(batches)


def test_an_evaluation_of_batches_never_ends_early():
    batches = iter([(X[:8], Y[:8])])
    with pytest.raises(UserError, match=r"reading batches of a map fails in .*test_trainer\.py, line \d+"):
        trainer().evaluate(map(partial(next_of, batches), range(3)))


class Table:
    """Columns by name, as a DataFrame has them: `[]` takes a name, and the length is that of a column."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (X, "A ndarray alone is not data"),
        (Table(x=X), "A Table alone is not data"),
        (3, "A int alone is not data"),
        ([(X, Y)], "the end of an iterable of batches is unknown. Give steps"),
        ({"inputs": X, "targets": Y[:5]}, "all arrays must have one row per example"),
    ],
)
def test_what_is_no_data_is_told(data, told):
    made = trainer()
    with pytest.raises(UserError, match=told):
        made.fit(data)


QUIET = {"progress": False, "say": lambda line: None}


def test_interruption_keeps_the_state_and_is_raised():
    """Ctrl-C ends after a whole step; the trainer continues from there, as if it had not happened."""

    class CtrlC:
        def on_step_begin(self, run):
            if run.step == 3:
                signal.raise_signal(signal.SIGINT)

    made = trainer({"data": 8})
    with pytest.raises(KeyboardInterrupt, match=r"interrupted after step [34] of 20") as caught:
        made.fit((X, Y), steps=20, callbacks=[CtrlC()], **QUIET)
    assert caught.value.fitted.steps == made.steps < 20
    made.fit((X, Y), steps=6 - made.steps, **QUIET)
    uninterrupted = trainer({"data": 8})
    uninterrupted.fit((X, Y), steps=6, **QUIET)
    jax.tree.map(np.testing.assert_array_equal, made.params, uninterrupted.params)


def test_objects_of_a_notebook_have_short_texts():
    made = trainer({"data": 8})
    fitted = made.fit((X, Y), steps=2, **QUIET)
    for value in (made, fitted, made.state, made.layouts, made.step):
        text = repr(value)
        assert len(text) < 200, text
        assert "\n" not in text
    assert repr(fitted).startswith("Fitted(steps=2, why='', loss=")
    assert "72 parameters; mesh data 8" in repr(made)
    html = made.layouts._repr_html_()
    assert html.count("<tr>") == 3, "the headings and two parameters"
    assert "<td>kernel</td>" in html


def test_progress_is_printed_and_passed_on(capsys):
    records = []
    made = trainer({"data": 8})
    made.fit((X, Y), steps=4, log_every=2, on_progress=records.append)
    printed = capsys.readouterr().out
    assert "step 2/4" in printed
    assert "step 4/4" in printed
    assert [record["step"] for record in records] == [2, 4]
    made.fit((X, Y), steps=2, progress=False)
    assert capsys.readouterr().out == ""


class Module:
    """A module that is not adapted."""


def made_of(model=None, optimizer=None, **options):
    model = Model(init=init, loss=loss, name="m") if model is None else model
    return Trainer(model, optax.sgd(0.1) if optimizer is None else optimizer, {"data": 8}, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": Module()}, r"Trainer: the model is an object of type Module\. .*spmdkit\.adapt\(Module\(\.\.\.\)"),
        ({"model": Module}, r"Trainer: the model is the class Module\. .*spmdkit\.adapt"),
        ({"model": loss}, r"Trainer: the model is an object of type function \(loss\)\. It must be"),
        ({"optimizer": "adamw"}, r"the optimizer must be .*, got 'adamw' \(str\)\. Give optax\.adamw\(1e-3\)"),
        ({"optimizer": optax.adam}, r"the optimizer must be .*\. Call adam, .*: adam\(1e-3\)"),
        ({"optimizer": 3}, r"the optimizer must be .*, got 3 \(int\)\. Give one, such as optax\.adamw"),
        ({"global_batch": 63}, r"63 rows cannot be split over data 8 .*63 % 8 = 7.*64 is the nearest"),
        ({"global_batch": "64"}, r"global_batch='64' must be a positive integer"),
        ({"global_batch": 0}, r"global_batch=0 must be a positive integer"),
    ],
)
def test_mistakes_in_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        made_of(**arguments)


def test_pair_of_functions_is_a_model():
    assert made_of((init, loss)).layouts.model_name == "model"


def test_rows_that_do_not_fit_the_model():
    """The message names the line of the user's loss and both shapes, before anything is compiled."""
    made = trainer({"data": 8})
    narrow = (X[:, :5], Y)
    message = r"loss fails in .*test_trainer.py, line \d+ .*\n?.*inputs float32 \(8, 5\).*kernel float32 \(6, 8\)"
    with pytest.raises(UserError, match=message):
        made.fit(narrow, steps=2, **QUIET)
    with pytest.raises(UserError, match=message):
        made.evaluate(narrow)
    with pytest.raises(UserError, match=r"KeyError: 'targets'"):
        made.fit({"inputs": X}, steps=2, **QUIET)
    assert made.steps == 0
