"""Two kinds of contestants, ours and theirs, behind the same four names: compiled, state, run, collectives."""

import jax
import numpy as np
from cases import Case
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.models.transformer import transformer
from spmdkit.parallel import build_step, census, lay_out


def batch(config, rows, sharding):
    """One batch of random tokens on the mesh."""
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (rows, config.length + 1)).astype(np.int32)
    arrays = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((rows, config.length), np.float32),
        "example": np.arange(rows, dtype=np.int32),
    }
    return {name: jax.device_put(array, sharding) for name, array in arrays.items()}


class Ours:
    """The runtime's step."""

    def __init__(self, config, setting, optimizer, rows):
        layouts = lay_out(transformer(config), setting.strategy)
        self.step = build_step(transformer(config), optimizer, layouts, remat=setting.remat)
        self.batch = batch(config, rows, layouts.batch_sharding())
        abstract = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in self.batch.items()}
        self.compiled = self.step.compile(abstract)
        self.state = self.step.init(0)
        self.collectives = census(self.compiled.as_text(), layouts.mesh)
        self.predicted = self.step.cost(abstract)

    def run(self):
        self.state, metrics = self.step(self.state, self.batch)
        return metrics.loss


class Theirs:
    """A hand-written step."""

    def __init__(self, config, make, sizes, optimizer, rows):
        self.step, self.state, sharding = make(config, optimizer, **sizes)
        self.batch = batch(config, rows, sharding)
        self.compiled = self.step.lower(self.state, self.batch).compile()
        self.collectives = census(self.compiled.as_text(), DeviceMesh.of(**sizes))
        self.predicted = self.collectives

    def run(self):
        self.state, (loss, _, _) = self.compiled(self.state, self.batch)
        return loss


def enter(case: Case, optimizer, rows):
    """All contestants of a case, compiled, by name."""
    ours = {name: Ours(case.config, setting, optimizer, rows) for name, setting in case.ours.items()}
    theirs = {name: Theirs(case.config, make, case.sizes, optimizer, rows) for name, make in case.theirs.items()}
    return ours | theirs


def memory(compiled):
    """Bytes of one device: what it is given and gives back, and what it needs between, less what is donated."""
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return total - sizes.alias_size_in_bytes
