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
from .telling import FACTS, PAGE, Told, as_text, write_facts, write_page
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
        0 where all but those left out have finished, 75 where a signal has stopped it; else of the exit codes of its
        runs, and of the looks at them, the first of 75, 1, 3, 2.

    Raises:
        ConfigError: The values cannot be combined.
        CannotRun: A combination cannot run, and `asked.skip_invalid` is not given; or none can.
    """
    told = [_looked_at(asked, run) for run in plan(asked)]
    _refuse(told, skip=asked.skip_invalid)
    folder = next(run.folder.parent for run in (each.run for each in told) if run.folder)
    if dry_run:
        _tell(told, folder, as_json=as_json)
        return worst_of(told)
    with redirect_stdout(sys.stderr):  # what runs print, as the output is the table's
        code = _train(asked, told, folder)
    _tell(told, folder, as_json=as_json)
    _compare(told, folder)
    return code


def _looked_at(asked: Asked, run: SweptRun) -> Told:
    """Looks at a run in a process of its own, where it has a config and is not finished."""
    if run.problem:
        return _unable(run, run.problem, run.exit_code, has_begun=not asked.fresh)
    if run.is_finished:
        return Told(run=run, status="finished")
    say(f"looking at {run.name}")
    devices = [f"run.simulate={asked.on.num_processes * asked.on.devices}"] if asked.on else []
    seen = look_apart(asked.source, [*run.overrides, *devices], fresh=asked.fresh)
    if seen.problem:
        return _unable(run, seen.problem, seen.exit_code, has_begun=not asked.fresh)
    return Told(run=replace(run, costs=seen.costs), status="waiting", has_begun=not asked.fresh)


def _unable(run: SweptRun, problem: str, exit_code: int, *, has_begun: bool) -> Told:
    """A run that cannot be trained: a mistake may be left out, anything else has failed."""
    status = "left out" if exit_code == USER_MISTAKE else "failed"
    return Told(run=run, status=status, exit_code=exit_code, reason=problem, has_begun=has_begun)


def _refuse(told: Sequence[Told], *, skip: bool) -> None:
    """Says which combinations cannot run.

    Raises:
        CannotRun: They are not to be left out, or nothing else is there.
    """
    mistakes, failed = ([each for each in told if each.status == status] for status in ("left out", "failed"))
    bad = [*mistakes, *failed]
    of = f"of {counted(len(told), 'combination')}"
    if bad and not (skip and len(bad) < len(told)):
        remedy = _remedy(mistakes, failed, others=len(bad) < len(told))
        lines = [f"{len(bad)} {of} cannot run, so nothing was trained:", *_reasons(bad), *remedy]
        error = CannotRun("\n".join(lines))
        error.exit_code = worst(each.exit_code for each in bad)
        raise error
    if mistakes:
        are = "is" if len(mistakes) == 1 else "are"
        say("\n".join([f"{len(mistakes)} {of} cannot run, and {are} left out (--skip-invalid):", *_reasons(mistakes)]))
    if failed:
        say("\n".join([f"{len(failed)} {of} cannot be trained now:", *_reasons(failed)]))


def _reasons(bad: Sequence[Told]) -> list[str]:
    """Why runs cannot be trained; what is said of several is said once."""
    names: dict[tuple[str, str], list[str]] = {}
    for each in bad:
        code = "" if each.exit_code == USER_MISTAKE else f" (exit code {each.exit_code})"
        names.setdefault((each.reason, code), []).append(each.run.name)
    return [f"{', '.join(named)}{code}:\n{_indented(reason)}" for (reason, code), named in names.items()]


def _remedy(mistakes: Sequence[Told], failed: Sequence[Told], *, others: bool) -> list[str]:
    """What mends it: one line, or none where nobody knows."""
    said = []
    if mistakes:
        them = "the mistakes" if failed else "them"
        said.append(f"Correct {them}{', or leave them out with --skip-invalid' if others else ''}.")
    if any(each.exit_code == TRY_AGAIN for each in failed):
        said.append("What ended with 75 is no mistake: the same command may work later.")
    return [" ".join(said)] if said else []


def _train(asked: Asked, told: Sequence[Told], folder: Path) -> int:
    """Trains what is waiting, in order; a run that fails holds up no other. Returns the exit code of the sweep."""
    for number, each in enumerate(told, 1):
        if each.status != "waiting":
            continue
        place = f"{number}/{len(told)}"
        say(f"{place} {each.run.name}, in {each.run.folder}")
        before = each.stamp
        ended = train_apart(asked, each.run, place)
        each.has_begun = each.has_begun or each.stamp != before
        failed = "stopped" if ended.signal else "failed"
        each.status = "finished" if ended.exit_code == FINISHED else failed
        each.exit_code, each.reason = ended.exit_code, ended.reason
        if ended.reason:
            say(f"{place} {each.run.name}: {ended.reason}")
        _keep(told, folder)
        if ended.signal and any(other.status in ("waiting", "stopped") for other in told):
            say(f"stopped by {ended.signal.name}; the same command{' without --fresh' if asked.fresh else ''} goes on")
            return TRY_AGAIN
    _keep(told, folder)
    return worst_of(told)


def _keep(told: Sequence[Told], folder: Path) -> None:
    """Writes sweep.json; where it cannot be written, that is told, as the runs matter more."""
    try:
        write_facts(told, folder)
    except OSError as error:
        say(f"{folder / FACTS} cannot be written: {error.strerror or error}; the sweep goes on without it")


def _compare(told: Sequence[Told], folder: Path) -> None:
    """Writes the page; where it cannot be written, that is told, as the runs are done."""
    try:
        page = write_page(told, folder)
    except OSError as error:
        why = error.strerror or error
        say(f"{folder / PAGE} cannot be written: {why}; spmdkit report compares the folders of the runs elsewhere")
        return
    if page:
        say(f"wrote {shown(page.absolute())}")


def worst_of(told: Sequence[Told]) -> int:
    """The exit code of a sweep: that of the runs that have failed; a mistake that was left out does not count."""
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
