"""The names that a module's own library has for what a checkpoint of spmdkit holds.

library      parameters                    state
Flax Linen   params/Dense_0/kernel         batch_stats/BatchNorm_0/mean     flax.traverse_util.flatten_dict, sep="/"
Flax NNX     first/kernel                  norm/mean                        nnx.to_flat_state, joined by "/"
Equinox      first/weight                  state/0, state/1, ...            jax.tree_util.keystr, simple; leaf by leaf
Keras        sequential/dense/kernel       sequential/norm/moving_mean      variable.path
"""

GROUPS = ("params", "model_state")
"""Of a train state: what a library keeps in its modules."""


def own_name(library: str, path: str) -> str:
    """The name that a library itself uses.

    Args:
        library: As `Model.library` says it; "" for a model of none.
        path: Of an array below one of `GROUPS`: "params/Dense_0/kernel".
    """
    group, _, name = path.partition("/")
    if library == "flax.linen" and group == "params":
        return path
    if library == "equinox" and group == "model_state":
        return f"state/{name}"
    return name


def groups_of(library: str) -> tuple[str, ...]:
    """The parts of a train state that an export of a model's parameters holds."""
    return GROUPS if library else GROUPS[:1]
