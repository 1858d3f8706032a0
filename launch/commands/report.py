"""`spmdkit report`: the report of a run, renewed from its folder, or one page that compares several."""

import argparse
import os
from pathlib import Path

from .command import OR_CONFIG, PLACE, Command, add_json

HELP = f"""
RUN is {PLACE};
or a CONFIG, a YAML file or preset whose run.dir holds a run:

  runs/one    runs/one/checkpoints/40    my.yaml

A page shows what is in the folders, so there is no key=value to lay over a config.
"""
COMPARED = "compare.html"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"{PLACE}{OR_CONFIG}")
    parser.add_argument(
        "--out", metavar="FILE.html", help=f"the file to write; by default RUN/report.html, of several {COMPARED}"
    )
    add_json(parser)


def report(arguments: argparse.Namespace) -> int:
    """Writes the page, and says what is on it."""
    import json

    from ...mesh.errors import UserError
    from ...mesh.text import printable
    from ..finished.place import find_folder
    from ..options import refuse_overrides
    from ..reporting.record import read_run
    from ..reporting.tell import told, written

    missing = [given for given in arguments.runs if not os.path.exists(given)]  # the name of a folder may contain =
    refuse_overrides(missing, "spmdkit report", "Give folders of runs, or configs, and --out FILE.html.")
    folders = [find_folder(given) for given in arguments.runs]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise UserError(f"{twice} is given twice: a run is compared with others. Give each run once.")
    records = [read_run(folder) for folder in folders]
    page = written(records, Path(arguments.out) if arguments.out else None, Path(COMPARED))
    facts = told(records, page)
    print(json.dumps(facts.plain, indent=2) if arguments.json else printable(facts.text))
    return 0


COMMAND = Command(
    "report",
    "the report of a run, renewed; or one page that compares several",
    "spmdkit report runs/quickstart",
    """
Writes report.html anew from what is in the folder of a run, also while it trains: no device is opened, and nothing of
the run is computed again. Of several runs it writes one page that compares them: curves over each other, final
figures, where the time went, and the keys in which their configs differ. A page is one file and loads nothing.

  spmdkit report runs/quickstart                   its report.html, as it is by now
  spmdkit report runs/a runs/b --out compare.html  both on one page
  spmdkit report runs/a runs/b --json              their figures and differences for a program
""",
    add_report,
    report,
    HELP,
)
