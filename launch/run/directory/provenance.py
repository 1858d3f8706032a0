"""What a run was made of, beyond its config: its data, and the source of the user's own model and optimizer.

provenance.json stands beside config.yaml. When a run goes on it is compared with what there is now. Other data is an
error: steps would train on examples that the run has not seen, or twice on the same. Another model is a warning, as it
may be meant. What a model *computes* is what counts: its loss is traced, and the text of the trace hashed, so that a
changed comment is no more than a remark, while a changed activation, which changes no shape, is told.
"""

import ast
import hashlib
import importlib.util
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....data.source import Splits, fingerprint
from ....mesh.errors import UserError
from ....mesh.keys import make_key
from ....parallel.sharding.lay_out import abstract_parameters
from ....parallel.step.update import apply_optimizer
from ..build import Built

NAME = "provenance.json"
NO_MATTER = re.compile(r"\b0x[0-9a-f]+|\b(?:name|fwd|bwd|jvp)=(?:<lambda>|\w+)")
"""What a trace shows of functions besides what they compute: their addresses and names."""
REMEDY = "set it back, choose another run.dir, or start anew with --fresh, which moves this run aside."


class Definition(NamedTuple):
    """What the user's own `module:function` is; empty for what comes with spmdkit.

    Attributes:
        name: as the config names it.
        program: hash of what it computes, as JAX traces it; "" where that is not known.
        files: module -> path and hash of its source: the module, and those beside it that it imports.
    """

    name: str
    program: str = ""
    files: Mapping[str, tuple[str, str]] = {}


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
        model=_definition(built.config.model["name"], lambda: jax.make_jaxpr(built.model.loss)(params, batch, key)),
        optimizer=_definition(_own_optimizer(built.config.optimizer.names), lambda: jax.make_jaxpr(update)(params)),
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
    changed = _changed_files(before.model, Definition(name, files=dict(_sources(name.partition(":")[0]))))
    if not changed:
        return ""
    return (
        f"model.name={name}: {changed} changed since the run in {folder} was made, and may compute something else than "
        "what was trained. Set it back if that is not meant."
    )


def _model_remarks(before: Definition, now: Definition, same_jax: bool) -> list[str]:
    changed = _changed_files(before, now)
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
    changed = _changed_files(before, now)  # without one, another program is another rate or length: they may change
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


def _changed_files(before: Definition, now: Definition) -> str:
    """The files whose source differs, with their verb; "" where there is none."""
    names = [*now.files, *(name for name in before.files if name not in now.files)]
    hashes = [{name: hashed for name, (_, hashed) in each.files.items()} for each in (before, now)]
    paths = [{**before.files, **now.files}[name][0] for name in names if hashes[0].get(name) != hashes[1].get(name)]
    return f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'}" if paths else ""


def _definition(name: str, trace: Callable[[], Any]) -> Definition:
    """The definition of what a config names; nothing is traced for what comes with spmdkit."""
    if ":" not in name:
        return Definition(name)
    return Definition(name, _program(trace), dict(_sources(name.partition(":")[0])))


def _program(trace: Callable[[], Any]) -> str:
    """A hash of the program that a function traces to, with its constants."""
    try:
        traced = trace()
        text = traced.jaxpr.pretty_print(use_color=False)
        return fingerprint([np.asarray(each) for each in traced.consts], NO_MATTER.sub("", text))
    except Exception:  # the user's code; whatever it cannot do is told when the step is built, not here
        return ""


def _sources(name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Module -> path and hash of its source, for a module and what it imports from beside it."""
    found: dict[str, Path] = {}
    waiting, top = [name], name.partition(".")[0]
    folder = _folder(sys.modules.get(top))
    while waiting:
        module_name = waiting.pop()
        path = _file(sys.modules.get(module_name))
        if module_name in found or path is None or folder is None or folder not in path.parents:
            continue
        if _installed(path) and module_name.partition(".")[0] != top:
            continue
        found[module_name] = path
        waiting += _imports(sys.modules[module_name], path)
    for module_name, path in sorted(found.items()):
        yield module_name, (str(path), hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest())


def _imports(module: ModuleType, path: Path) -> Iterator[str]:
    """The names of modules that a module's source may import, anywhere in it, with those of their packages."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.__package__ or None
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _folder(module: ModuleType | None) -> Path | None:
    """The folder in which a module or package stands."""
    path = _file(module)
    if path is None:
        return None
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _file(module: ModuleType | None) -> Path | None:
    """The source of a module, where it has one."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") and Path(file).is_file() else None


def _installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    return any(Path(sysconfig.get_paths()[name]).resolve() in path.parents for name in ("purelib", "platlib", "stdlib"))
