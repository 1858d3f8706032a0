"""What XLA is told reaches the compiled step and its evaluation."""

import jax
import numpy as np
import optax
import pytest

import spmdkit


def build(**options):
    model = spmdkit.Model(
        init=lambda key: {"w": jax.random.normal(key, (4,))},
        loss=lambda params, batch, key: ((batch["inputs"] @ params["w"]).sum(), batch["weights"].sum()),
    )
    return spmdkit.build_step(model, optax.sgd(0.1), spmdkit.lay_out(model, {"data": 8}), **options)


def batch():
    return {"inputs": np.ones((8, 4), np.float32), "weights": np.ones(8, np.float32)}


def test_an_option_that_XLA_does_not_know_is_its_error():
    step = build(xla={"xla_nope": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_nope'"):
        step.compile({name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch().items()})
    params = build().init(0).params
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nope"):
        step.evaluate(params, batch())


@pytest.mark.slow
def test_options_leave_the_program_as_it_was():
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch().items()}
    told, plain = build(xla={"xla_cpu_enable_fast_math": False}), build()
    assert told.lower(shapes).as_text() == plain.lower(shapes).as_text()
    (_, ours), (_, theirs) = told(told.init(0), batch()), plain(plain.init(0), batch())
    assert float(ours.loss) == float(theirs.loss)
