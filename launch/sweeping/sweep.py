"""`spmdkit sweep`: combinations -> configs -> a look at each -> one run after the other -> table and page.

Every combination is looked at before the first one trains: a sweep does not end in the night at the mistake of its
seventh run. What a folder holds already is not trained again, so the same command goes on where a sweep was stopped.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from ...layouts.sizes import counted
from ...mesh.errors import UserError
from ...mesh.text import printable
from ...training.ending.exits import DIVERGED, FAILED, FINISHED, TRY_AGAIN, USER_MISTAKE
from ..inspection.finding import shown
from .look import look_apart
from .planning import Asked, SweptRun, plan
from .telling import Told, as_text, write_facts, write_page
from .telling import plain as as_plain
from .training import train_apart

ORDER = (TRY_AGAIN, FAILED, DIVERGED, USER_MISTAKE)
"""Of several exit codes the first of these counts: what the same command may mend goes first."""


class CannotRun(UserError):
    """Some combinations cannot run; nothing was trained."""


def sweep(asked: Asked, *, dry_run: bool = False, as_json: bool = False) -> int:
    """Trains every combination that is not trained yet, one after the other.

    Args:
        asked: Which ones.
        dry_run: Only look at them, and say what each would hold and send.
        as_json: Print one JSON object instead of the table.

    Returns:
        0 where all have finished, 75 where a signal has stopped it; else of the exit codes of its runs the first of
        75, 1, 3, 2.

    Raises:
        ConfigError: The values cannot be combined.
        CannotRun: A combination cannot run, and `asked.skip_invalid` does not leave it out; or none can.
    """
    told = [_looked_at(asked, run) for run in plan(asked)]
    _refuse(told, skip=asked.skip_invalid)
    folder = next(run.folder.parent for run in (each.run for each in told) if run.folder)
    if dry_run:
        _tell(told, folder, as_json=as_json)
        return FINISHED
    with redirect_stdout(sys.stderr):  # what runs print, as the output is the table's
        code = _train(asked, told, folder)
    page = write_page(told, folder)
    _tell(told, folder, as_json=as_json)
    if page:
        say(f"wrote {shown(page.absolute())}")
    return code


def _looked_at(asked: Asked, run: SweptRun) -> Told:
    """Looks at a run in a process of its own, where it has a config and is not finished."""
    if run.problem:
        return Told(run=run, status="left out", exit_code=run.exit_code, reason=run.problem)
    if run.is_finished:
        return Told(run=run, status="finished")
    say(f"looking at {run.name}")
    devices = [f"run.simulate={asked.on.num_processes * asked.on.devices}"] if asked.on else []
    seen = look_apart(asked.source, [*run.overrides, *devices], fresh=asked.fresh)
    if seen.problem:
        return Told(run=run, status="left out", exit_code=seen.exit_code, reason=seen.problem)
    return Told(run=replace(run, costs=seen.costs), status="waiting")


def _refuse(told: Sequence[Told], *, skip: bool) -> None:
    """Says which combinations cannot run.

    Raises:
        CannotRun: They are not to be left out, or nothing else is there.
    """
    bad = [each for each in told if each.status == "left out"]
    if not bad:
        return
    names: dict[str, list[str]] = {}
    for each in bad:
        names.setdefault(each.reason, []).append(each.run.name)
    reasons = [f"{', '.join(named)}:\n{_indented(reason)}" for reason, named in names.items()]
    head = f"{len(bad)} of {counted(len(told), 'combination')} cannot run"
    if skip and len(bad) < len(told):
        say("\n".join([f"{head}, and {'is' if len(bad) == 1 else 'are'} left out (--skip-invalid):", *reasons]))
        return
    remedy = "Correct them" if len(bad) == len(told) else "Correct them, or leave them out with --skip-invalid"
    error = CannotRun("\n".join([f"{head}, so nothing was trained:", *reasons, f"{remedy}."]))
    error.exit_code = worst(each.exit_code for each in bad)
    raise error


def _train(asked: Asked, told: Sequence[Told], folder: Path) -> int:
    """Trains what is waiting, in order; a run that fails holds up no other. Returns the exit code of the sweep."""
    for number, each in enumerate(told, 1):
        if each.status != "waiting":
            continue
        place = f"{number}/{len(told)}"
        say(f"{place} {each.run.name}, in {each.run.folder}")
        ended = train_apart(asked, each.run, place)
        failed = "stopped" if ended.signal else "failed"
        each.status = "finished" if ended.exit_code == FINISHED else failed
        each.exit_code, each.reason = ended.exit_code, ended.reason
        if ended.reason:
            say(f"{place} {each.run.name}: {ended.reason}")
        write_facts(told, folder)
        if ended.signal and any(other.status in ("waiting", "stopped") for other in told):
            say(f"stopped by {ended.signal.name}; the same command goes on")
            return TRY_AGAIN
    write_facts(told, folder)
    return worst(each.exit_code for each in told if each.status == "failed")


def worst(codes: Iterable[int | None]) -> int:
    """Of several exit codes the one that counts; 0 where there is none."""
    found = [code for code in codes if code]
    return next((code for code in ORDER if code in found), found[0] if found else FINISHED)


def _tell(told: Sequence[Told], folder: Path, *, as_json: bool) -> None:
    plain = as_plain(told, folder)
    print(json.dumps(plain, indent=2) if as_json else printable(as_text(plain["runs"])))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def say(text: str) -> None:
    """Prints what goes on to stderr: the output is the table's."""
    print(printable("\n".join(f"spmdkit sweep: {line}" for line in text.splitlines())), file=sys.stderr, flush=True)
