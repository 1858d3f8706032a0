"""A device that gets no memory in the middle of a step: the others wait for it, and its error ends the run (row 20)."""

import pytest
from support.matrix import UnderFaults

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]

HUNGRY = '''
import ctypes, os, resource, time
import jax, jax.numpy as jnp
from spmdkit import Model
from spmdkit.parallel.step.train_step import Step

TIMES, WIDTH = 512, 4096

def limit_before(step):
    """Leaves one and a half times the memory that a step takes on one device: of two devices one gets it."""
    original, calls = Step.__call__, []
    def call(self, state, batch):
        calls.append(step)
        if len(calls) == step:
            jax.block_until_ready((state.params, batch))
            time.sleep(0.5)  # what the step before has used is given back after its results are ready
            ctypes.CDLL(None).malloc_trim(0)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            room = next(iter(self._compiled.values())).memory_analysis().temp_size_in_bytes * 3 // 2
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
        return original(self, state, batch)
    Step.__call__ = call

def model(features=64, classes=10):
    if os.environ.get("SPMDKIT_PROCESS_ID") == "1":
        limit_before(6)

    def init(key):
        return {"kernel": jax.random.normal(key, (features, WIDTH)) * 0.02, "out": jnp.zeros((WIDTH, classes))}

    def loss(params, batch, key):
        inputs = batch["inputs"].reshape(-1, features)
        hidden = jnp.tanh(jnp.repeat(inputs, TIMES, axis=0) @ params["kernel"])
        logits = (hidden @ params["out"]).reshape(len(inputs), TIMES, classes).mean(1)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][:, None], axis=1)[:, 0]
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    return Model(init=init, loss=loss, name="hungry")
'''


def test_reports_allocation_failure_in_a_step(tmp_path):
    (tmp_path / "hungry.py").write_text(HUNGRY)
    sections = {"model": {"name": "hungry:model"}, "strategy": {"data": 4}, "eval": {"every": 0, "batches": 2}}
    run = UnderFaults(tmp_path, [], timeouts={"rendezvous": 60, "heartbeat": 60, "step": 30}, **sections)
    ended = run.launch()
    assert ended.code == 75, ended.stderr
    assert run.causes() == [(1, "exit code 75", 75)], ended.stderr
    said = ended.stderr.rpartition("rank 1 failed first")[0]
    assert "error: There is not enough memory: JaxRuntimeError: step 6, cpu:204" in said
    assert " of rank 1 on " in said
    assert "RESOURCE_EXHAUSTED: Out of memory allocating " in said
    assert "No progress" not in ended.stderr
