"""What a run was made of, beyond its config: its data, and the source of the user's own model and optimizer.

provenance.json stands beside config.yaml. When a run goes on it is compared with what there is now. Other data is an
error: steps would train on examples that the run has not seen, or twice on the same. Another model is a warning, as it
may be meant, where it computes something else; a changed comment is no more than a remark (see `definition`).
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....data.source import Splits
from ....mesh.errors import UserError
from ....mesh.keys import make_key
from ....parallel.sharding.lay_out import abstract_parameters
from ....parallel.step.update import apply_optimizer
from ..build import Built
from .definition import Definition, changed_files, definition, sources

NAME = "provenance.json"
REMEDY = "set it back, choose another run.dir, or start anew with --fresh, which moves this run aside."


class Provenance(NamedTuple):
    """What a run is made of.

    Attributes:
        fingerprint: of the data, see `Splits`; "" where unknown.
        description: of the data, for people.
        model: the model.
        optimizer: the optimizer.
        jax: version of JAX and whether it uses 64-bit types; traces compare only where these are the same.
    """

    fingerprint: str
    description: str
    model: Definition
    optimizer: Definition
    jax: str


def provenance(built: Built) -> Provenance:
    """What a run that is ready to start is made of."""
    params = abstract_parameters(built.model, built.config.precision)
    batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in built.batch.items()}
    key = jax.eval_shape(lambda: make_key(0))
    optimizer = built.step.optimizer

    def update(params: Any) -> Any:
        return apply_optimizer(optimizer, params, optimizer.init(params), params, jnp.zeros(()))

    return Provenance(
        fingerprint=built.splits.fingerprint,
        description=built.splits.description,
        model=definition(built.config.model["name"], lambda: jax.make_jaxpr(built.model.loss)(params, batch, key)),
        optimizer=definition(_own_optimizer(built.config.optimizer.names), lambda: jax.make_jaxpr(update)(params)),
        jax=f"{version('jax')}{', 64-bit types' if jax.config.read('jax_enable_x64') else ''}",
    )


def _own_optimizer(names: Sequence[str]) -> str:
    """Of the optimizers of a run the first that is the user's own; where none is, the first."""
    return next((name for name in names if ":" in name), names[0])


def as_json(found: Provenance) -> str:
    """The text of provenance.json."""
    definitions = {name: getattr(found, name)._asdict() for name in ("model", "optimizer")}
    return json.dumps({**found._asdict(), **definitions}, indent=2) + "\n"


def read_provenance(folder: Path) -> Provenance | None:
    """What a run's folder says that it is made of; None where it does not say, as those of earlier versions.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / NAME
    try:
        fields = json.loads(path.read_bytes())
        model, optimizer = (
            Definition(**{**each, "files": {name: (str(file), str(hashed)) for name, (file, hashed) in files.items()}})
            for each in (fields["model"], fields["optimizer"])
            for files in [each["files"]]
        )
        return Provenance(**{**fields, "model": model, "optimizer": optimizer})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: {type(error).__name__}: {error}. Put it back, or remove it: this run then goes on "
            "without comparing its data and its model with what they were."
        ) from error


def check_data(folder: Path, before: Provenance, now: Provenance) -> None:
    """Compares the data of a run with what it was.

    Raises:
        UserError: It is other data.
    """
    if before.fingerprint and now.fingerprint and before.fingerprint != now.fingerprint:
        raise UserError(
            f"{folder} holds a run on other data: the contents, names or number of its examples, their length, or the "
            "way they are split have changed since.\n"
            f"  then: {before.description} (fingerprint {before.fingerprint})\n"
            f"  now:  {now.description} (fingerprint {now.fingerprint})\n"
            "Give the old data back to go on with it, choose another run.dir, or start anew with --fresh, which moves "
            "this run aside."
        )


def remarks(before: Provenance | None, now: Provenance, source: str, *, goes_on: bool) -> list[str]:
    """What to tell the user about a run that starts or goes on.

    Args:
        before: What the run was made of; None for a new run, or one that did not say.
        now: What it is made of.
        source: `data.source`.
        goes_on: Whether the run goes on from a checkpoint.

    Returns:
        Lines, those that ask for something to be done beginning with "warning: ".
    """
    lines = []
    if not now.fingerprint:
        lines.append(
            f"warning: data.source={source} gives no fingerprint: if its data changes, a run that goes on will not "
            "notice. Set Splits.fingerprint to text that changes with the data (spmdkit.data.fingerprint makes one)."
        )
    if before is None:
        missing = (
            f"There is no {NAME} from before: whether data and model are those that the run was made of is not known."
        )
        return [*lines, missing] if goes_on else lines
    same_jax = before.jax == now.jax
    lines += _model_remarks(before.model, now.model, same_jax)
    return lines + _optimizer_remarks(before.optimizer, now.optimizer, same_jax)


def changed_data(folder: Path, splits: Splits) -> str:
    """Says where data is not that of a run; "" where it is, or nothing tells.

    Args:
        folder: Of the run.
        splits: What its config names now.

    Raises:
        UserError: provenance.json is damaged.
    """
    before = read_provenance(folder)
    if before is None or not before.fingerprint or not splits.fingerprint or before.fingerprint == splits.fingerprint:
        return ""
    return (
        f"The data is not what the run in {folder} was made of: then {before.description}, now {splits.description}. "
        "Its evaluation split may hold rows that the run was trained on. Give the old data back, or say which to take "
        "with data.eval_files."
    )


def changed_model(folder: Path, name: str) -> str:
    """Says where the source of a run's own model is no longer what it was; "" where it is, or nothing tells.

    Args:
        folder: Of the run.
        name: `model.name`, whose module is imported.

    Raises:
        UserError: provenance.json is damaged.
    """
    before = read_provenance(folder) if ":" in name else None
    if before is None:
        return ""
    changed = changed_files(before.model, Definition(name, files=dict(sources(name.partition(":")[0]))))
    if not changed:
        return ""
    return (
        f"model.name={name}: {changed} changed since the run in {folder} was made, and may compute something else than "
        "what was trained. Set it back if that is not meant."
    )


def _model_remarks(before: Definition, now: Definition, same_jax: bool) -> list[str]:
    changed = changed_files(before, now)
    if not (same_jax and before.program and now.program):
        return _source_remark("model.name", now, changed)
    if before.program != now.program:
        why = f"{changed} changed" if changed else "no file of it has changed, so a package that it uses has"
        return [
            f"warning: model.name={now.name} computes another loss than when this run was made ({why}). What follows "
            f"goes on from the old parameters with the new model. If that is not meant, {REMEDY}"
        ]
    return [f"model.name={now.name}: {changed} changed since, but not what the loss computes."] if changed else []


def _optimizer_remarks(before: Definition, now: Definition, same_jax: bool) -> list[str]:
    changed = changed_files(before, now)  # without one, another program is another rate or length: they may change
    if changed and same_jax and now.program and before.program == now.program:
        return [f"optimizer.name={now.name}: {changed} changed since, but not what the update computes."]
    return _source_remark("optimizer.name", now, changed)


def _source_remark(key: str, now: Definition, changed: str) -> list[str]:
    if not changed:
        return []
    return [
        f"warning: {key}={now.name}: {changed} changed since this run was made, and may compute something else. If "
        f"that is not meant, {REMEDY}"
    ]
