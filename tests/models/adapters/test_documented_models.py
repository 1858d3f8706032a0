"""Models of the forms that the libraries' documentation has, from YAML under FSDP 8, against the library's own loop.

The loops here are written with each library's own calls, on one device, whole batches at a time, in float64; what they
start from and the rows that they see are those of the run. Nothing else of spmdkit is in them.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.configs import load_config
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.runtime.build_run import build
from spmdkit.runtime.rollbacks import batches_after

FORMS = Path(__file__).parent / "documented"
RATE, STEPS = 0.1, 3
YAML = """
run: {{simulate: 8, root: {root}, dir: {folder}}}
model: {{name: "{model}", loss: "{loss}"}}
data: {{source: "documented_data:{data}", length: 12}}
strategy: {{fsdp: {{size: 8, floor_bytes: 128}}}}
optimizer: {{name: sgd, learning_rate: {rate}}}
precision: {{params: float64, compute: float64, reduce: float64}}
train: {{steps: {steps}, global_batch: 16, clip_norm: 0}}
"""


@pytest.fixture(autouse=True)
def as_the_libraries_have_it(monkeypatch):
    """Libraries add a bias to rows without saying so; 64 bits are on."""
    monkeypatch.syspath_prepend(str(FORMS))
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(True):
        yield


def built(tmp_path, model, loss, data):
    """A run of a form, ready to start."""
    values = {"model": model, "loss": loss, "data": data}
    text = YAML.format(root=FORMS, folder=tmp_path / "run", rate=RATE, steps=STEPS, **values)
    assert len(text.splitlines()) <= 20
    (tmp_path / "form.yaml").write_text(text, encoding="utf-8")
    return build(load_config(tmp_path / "form.yaml"))


def trained(run):
    """What the run starts from, the rows of its steps, and the losses of these."""
    state, losses = run.step.init(0), []
    first = [dict(host(tree)) for tree in (state.params, state.model_state)]
    batches = [dict(host(batch)) for batch in batches_after(0, run)]
    for batch in batches:
        state, metrics = run.step(state, batch)
        losses.append(float(metrics.loss))
    return first, batches, losses


def host(tree):
    return [(path, np.asarray(leaf)) for path, leaf in leaves_with_paths(tree)]


def loop(call, loss, params, state, batches):
    """Gradient descent on one device: call(params, state, batch) -> (outputs, next state)."""

    def mean(params, state, batch):
        outputs, state = call(params, state, batch)
        return loss(outputs, batch).mean(), state

    step = jax.jit(jax.value_and_grad(mean, has_aux=True))
    losses = []
    for batch in batches:
        batch = {
            name: jnp.asarray(each, each.dtype if each.dtype.kind == "i" else "float64") for name, each in batch.items()
        }
        (value, state), gradients = step(params, state, batch)
        params = jax.tree.map(lambda leaf, slope: leaf - RATE * slope, params, gradients)
        losses.append(float(value))
    return losses


def cross_entropy(logits, batch):
    log_p = logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    return -jnp.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]


def named(form):
    module, _, name = form.partition(":")
    return getattr(__import__(module), name)


def of_linen(form, loss, arrays, batches, **mode):
    from flax.traverse_util import unflatten_dict

    module, (params, state) = named(form)(), arrays
    params, state = unflatten_dict(params, sep="/"), unflatten_dict(state, sep="/")

    def call(params, state, batch):
        outputs, state = module.apply({"params": params, **state}, batch["inputs"], **mode, mutable=["batch_stats"])
        return outputs, dict(state)

    return loop(call, loss, params, state, batches)


def of_nnx(form, loss, arrays, batches, **mode):
    from flax import nnx

    model, values = named(form)(rngs=nnx.Rngs(3)), {**arrays[0], **arrays[1]}
    names = {path: "/".join(map(str, path)) for path in nnx.to_flat_state(nnx.state(model)).paths}
    given = {path: jnp.asarray(values[name]) for path, name in names.items() if name in values}
    nnx.update(model, nnx.from_flat_state(given))
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def call(params, rest, batch):
        model = nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, rest))  # variables of this trace
        return model(batch["inputs"], **mode), nnx.split(model, nnx.Param, ...)[2]

    return loop(call, loss, params, rest, batches)


def of_equinox(form, loss, arrays, batches, **more):
    import equinox as eqx
    from jax.tree_util import keystr, tree_map_with_path

    more = {**more, "key": jax.random.key(more["key"])} if more else {}
    values = {name: jnp.asarray(array) for name, array in arrays[0].items()}
    model = named(form)(key=jax.random.key(3))
    model = tree_map_with_path(lambda path, leaf: values.get(keystr(path, simple=True, separator="/"), leaf), model)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def call(params, state, batch):
        model = eqx.combine(params, static)
        return jax.vmap(lambda x: model(x, **more))(batch["inputs"]), state

    return loop(call, loss, params, (), batches)


def of_keras(form, loss, arrays, batches):
    fresh_keras()
    model = named(form)()
    if not model.built:
        model(batches[0]["inputs"])
    params, state = arrays
    trained = [jnp.asarray(params[variable.path]) for variable in model.trainable_variables]
    kept = [jnp.asarray(state.get(variable.path, variable.value)) for variable in model.non_trainable_variables]

    def call(trained, kept, batch):
        return model.stateless_call(trained, kept, batch["inputs"], training=True)

    return loop(call, loss, trained, kept, batches)


def fresh_keras():
    """Names are counted from one again, and everything is float64."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def own_loss(form):
    return cross_entropy if ":" not in form else named(form)


CASES = {
    "linen_forms:ResNet": ("images", "softmax_cross_entropy", of_linen, {"train": True}),
    "linen_forms:Annotated": ("next_tokens", "softmax_cross_entropy", of_linen, {}),
    "nnx_forms:MiniGPT": ("next_tokens", "softmax_cross_entropy", of_nnx, {"training": True}),
    "equinox_forms:RNN": ("spirals", "equinox_forms:binary_cross_entropy", of_equinox, {}),
    "equinox_forms:VisionTransformer": (
        "channels_first",
        "softmax_cross_entropy",
        of_equinox,
        {"enable_dropout": True, "key": 0},
    ),
    "keras_forms:text_transformer": ("tokens", "keras_forms:negative_log_likelihood", of_keras, {}),
    "keras_forms:subclassed": ("images", "keras_forms:negative_log_likelihood", of_keras, {}),
}
"""The rows, the loss, the library's own loop and what its module is called with besides."""
TOLERANCE = {"keras_forms:text_transformer": 1e-6, "nnx_forms:MiniGPT": 1e-6}
"""Of a loss; 1e-9 elsewhere. The softmax of `jax.nn.dot_product_attention` is float32, whatever it is given."""


@pytest.mark.long_cases(*(form for form in CASES if form != "keras_forms:subclassed"))
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The model does not pass JAX's checks")
@pytest.mark.parametrize("form", CASES)
def test_losses_are_those_of_its_own_library(form, tmp_path):
    data, loss, reference, options = CASES[form]
    if reference is of_keras:
        fresh_keras()
    first, batches, losses = trained(built(tmp_path, form, loss, data))
    expected = reference(form, own_loss(loss), first, batches, **options)
    assert len(losses) == STEPS
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE.get(form, 1e-9))
