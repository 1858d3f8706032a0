"""Renews what README and the pages of docs/ show: the output of commands, and the pictures. `make figures` runs it.

A comment above a block or a table says that it is made by a command:

    <!-- figure -->               a console block: the output under each of its `$` lines
    <!-- figure: COMMAND -->      a text block: the whole output; a table: the lines of the output that begin with `|`
    <!-- figure timed -->         its numbers depend on the machine, so no test holds them
    <!-- figure slow -->          it takes minutes, and is renewed with --slow alone

With --slow also the losses in the comments of the presets, by training each. The pages of docs/strategies/ are made as
a whole (docs/making/strategy_pages.py).

A block that leaves lines out (`...`) keeps its choice of lines: each is found again by its words, and its numbers are
renewed. Commands run in an empty folder that holds the page's own files: blocks whose first line is a comment such as
`# my.yaml`, and what `$ cat FILE` shows. Nothing is written where a line is no longer printed; that is said at the end.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = ROOT / "docs" / "pictures"
CONFIGS = [*sorted((ROOT / "configs" / "presets").glob("*.yaml")), ROOT / "examples" / "own_model.yaml"]
BY_HAND = {
    "benchmarks/RESULTS.md": "make bench",
    "docs/slow-links.md, losses": "make train CONFIG=diloco, CONFIG=compressed",
}
"""Figures that no command prints in the form in which they are shown -> what measures them."""
FIGURE = re.compile(r"^<!-- figure(?P<kinds>(?: \w+)*)(?:: (?P<command>.+?))? -->\n", re.MULTILINE)
FENCE = re.compile(r"```\w*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?P<body>(?:^\|.*\n)+)", re.MULTILINE)
FILE = re.compile(r"^```(?:python|yaml)\n(?P<body># (?P<name>[\w/]+\.(?:py|yaml))\b.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
UNIT = re.compile(r"(?<=#)( ?)(?:[kMGT]i?B?|[kMGT]?(?= FLOP)|B|us|ms|s|min)\b")
LEFT_OUT = "..."
COLUMNS = "110"
"""Width of the terminal that commands are told."""

Run = Callable[[str, Path], str]
"""Runs a command line in a folder; gives what it prints."""


class Figure(NamedTuple):
    """What a comment marks: from `start` to `end` of the page's text.

    Attributes:
        kinds: `timed`, `slow`.
        command: What makes it; empty for a console block, which holds its commands.
        body: What is shown now.
        start: Where the body begins in the page.
        end: Where it ends.
    """

    kinds: frozenset[str]
    command: str
    body: str
    start: int
    end: int


def figures(text: str) -> list[Figure]:
    """Finds the figures of a page."""
    found = []
    for mark in FIGURE.finditer(text):
        shape = FENCE if text.startswith("```", mark.end()) else TABLE
        match = shape.match(text, mark.end())
        if match is None:
            raise ValueError(f"no block and no table follows {mark[0].strip()}")
        start, end = match.span("body")
        found.append(Figure(frozenset(mark["kinds"].split()), mark["command"] or "", match["body"], start, end))
    return found


def write_files(text: str, folder: Path) -> None:
    """Writes the files that a page shows into a folder."""
    for match in FILE.finditer(text):
        path = folder / match["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(match["body"], encoding="utf-8")


def renew(figure: Figure, run: Run, folder: Path) -> tuple[str, list[str]]:
    """Makes a figure anew.

    Args:
        figure: What is shown now.
        run: Runs its commands.
        folder: Where they run.

    Returns:
        What to show, and the lines that could not be renewed.
    """
    if figure.command:
        printed = run(figure.command, folder)
        if figure.body.startswith("|"):
            return "".join(f"{line}\n" for line in printed.splitlines() if line.startswith("|")), []
        lines, lost = renewed_lines(figure.body.splitlines(), printed.splitlines())
        return "".join(f"{line}\n" for line in lines), lost
    body, lost = [], []
    for command, shown in console(figure.body):
        body.append(f"$ {command}")
        words = words_typed(command)
        if words[0] == "cat":
            (folder / words[1]).write_text("".join(f"{line}\n" for line in shown), encoding="utf-8")
        if words[0] == "cat" or not shown:
            body += shown
            continue
        lines, missing = renewed_lines(shown, run(command, folder).rstrip().splitlines())
        body, lost = body + lines, lost + missing
    return "".join(f"{line}\n" for line in body), lost


def console(body: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each command of a console block with the lines shown under it."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def renewed_lines(shown: Sequence[str], printed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the lines to show now, and those shown that are no longer printed.

    Args:
        shown: The lines so far; where one is `...`, the others choose which of the printed ones are shown.
        printed: The whole output.
    """
    printed = [line.rstrip() for line in printed]
    if LEFT_OUT not in shown:
        return printed, []
    lines, lost, at = [], [], 0
    for line in shown:
        if line == LEFT_OUT:
            lines.append(line)
            continue
        same = [index for index in range(at, len(printed)) if words_of(printed[index]) == words_of(line)]
        if not same:
            lost.append(line)
            lines.append(line)
            continue
        best = max(same, key=lambda index: (same_start(printed[index], line), -index))
        lines.append(printed[best])
        at = best + 1
    return lines, lost


def same_start(one: str, other: str) -> int:
    """Counts the characters that two lines begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def words_of(line: str) -> str:
    """A line without its numbers, units and alignment."""
    return " ".join(UNIT.sub("", NUMBER.sub("#", line)).split())


def words_typed(line: str) -> list[str]:
    """The words of a command line, without its comment."""
    return shlex.split(line, comments=True)


def run_command(line: str, folder: Path) -> str:
    """Runs a command as a user would; `spmdkit` and `python` are those of this environment.

    Raises:
        RuntimeError: It ended with an error that is not a user's mistake.
    """
    words = words_typed(line)
    words = {"spmdkit": [sys.executable, "-m", "spmdkit"], "python": [sys.executable]}.get(words[0], words[:1]) + words[
        1:
    ]
    if words[0] == sys.executable and words[1].startswith("benchmarks/"):
        words[1] = str(ROOT / words[1])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SPMDKIT_"))
    }
    ended = subprocess.run(
        words,
        cwd=folder,
        env=environment | {"COLUMNS": COLUMNS},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if ended.returncode not in (0, 2):
        raise RuntimeError(f"{line} ended with {ended.returncode}: {ended.stdout[-500:]}")
    return ended.stdout


def renew_page(text: str, run: Run, *, slow: bool) -> tuple[str, list[str], int]:
    """Makes every figure of a page anew.

    Returns:
        The page's text, what could not be renewed, and the number of figures made.
    """
    problems, made = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(text, folder)
        changes = []
        for figure in figures(text):
            if "slow" in figure.kinds and not slow:
                problems.append(f"slow, renewed with --slow: {figure.command or figure.body.splitlines()[0]}")
                continue
            body, lost = renew(figure, run, folder)
            problems += [f"no longer printed: {line}" for line in lost]
            changes.append((figure, body))
            made += 1
    for figure, body in reversed(changes):
        text = text[: figure.start] + body + text[figure.end :]
    return text, problems, made


def main() -> int:
    """Renews the pages named, or all; returns 1 where a line that is shown is no longer printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", type=Path, metavar="PAGE", help="README.md, docs/verify.md, ...; default all"
    )
    parser.add_argument("--slow", action="store_true", help="also those that take minutes")
    arguments = parser.parse_args()
    draw_pictures()
    failed = False
    for page in [path.resolve() for path in arguments.pages] or PAGES:
        text = page.read_text(encoding="utf-8")
        new, problems, made = renew_page(text, run_command, slow=arguments.slow)
        if not made and not problems:
            continue
        page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {made} figures, {'changed' if new != text else 'as before'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
        failed |= any(problem.startswith("no longer") for problem in problems)
    if arguments.slow and not arguments.pages:
        for path in CONFIGS:
            renew_expectation(path, run_command)
    print("Not renewed here:", *(f"  {what}: {by}" for what, by in BY_HAND.items()), sep="\n")
    return int(failed)


def renew_expectation(path: Path, run: Run) -> None:
    """Trains a config and renews the losses in its line `# expect:`."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        printed = run(f"spmdkit train {path} run.dir=run", Path(name))
    new = expected_losses(text, printed)
    path.write_text(new, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {'changed' if new != text else 'as before'}", flush=True)


def expected_losses(text: str, printed: str) -> str:
    """Returns a config with the losses of its line `# expect:` as a run printed them, to two decimals."""
    for before, wanted in (
        ("evaluation loss ", r"Evaluation loss (\S+) after"),
        ("a bigram model: ", r"the (\S+) of a bigram model"),
    ):
        found = re.search(wanted, printed)
        if found:
            text = re.sub(rf"(?m)^(# expect:.*?{before})[\d.]+", rf"\g<1>{float(found[1]):.2f}", text)
    return text


def draw_pictures() -> None:
    """Draws the pictures of the pages, and makes the pages of the strategies."""
    from making import strategy_pages

    PICTURES.mkdir(exist_ok=True)
    for name, draw in pictures().items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")
    strategy_pages.write(ROOT / "docs")


def pictures() -> dict[str, Callable[[], str]]:
    """Returns name of a picture's file -> what draws its text."""
    from making import concepts_svg
    from picture import draw
    from spmdkit.parallel.schedule.builders import make_schedule
    from spmdkit.report.schedule_drawing import draw_svg

    return {
        "mesh.svg": draw,
        "zb_h1.svg": lambda: draw_svg(make_schedule("zb_h1", 4, 8)),
        "layout.svg": concepts_svg.draw_layout,
        "step.svg": concepts_svg.draw_step,
        "run.svg": concepts_svg.draw_run,
    }


if __name__ == "__main__":
    sys.exit(main())
