"""`spmdkit report`: renews the report of a run from its directory, or writes one page that compares several runs."""

import argparse
import json
from pathlib import Path

from .command import OR_CONFIG, PLACE, Command, add

COMPARED = "compare.html"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"{PLACE}{OR_CONFIG}")
    text = f"the file to write (default: RUN/report.html; for several runs {COMPARED})"
    parser.add_argument("--out", metavar="FILE.html", type=Path, help=text)
    add(parser, "--json")


def report(arguments: argparse.Namespace) -> int:
    """Renews the report of a run, or compares several runs on one page.

    Writes report.html again from the content of a run directory, also during training. No device is opened, and nothing
    of the run is computed again. For several runs it writes one page that compares them: curves in the same charts,
    final figures, where the time went, and the keys in which their configs differ. A page is one file and loads
    nothing.

      spmdkit report runs/quickstart                   its report.html, up to date
      spmdkit report runs/a runs/b --out compare.html  both on one page
      spmdkit report runs/a runs/b --json              their figures and differences for a program

    RUN is the directory of a run (run.dir) or of one of its checkpoints; or a CONFIG, a YAML file or preset whose
    run.dir contains a run:

      runs/one    runs/one/checkpoints/40    my.yaml

    A page shows the content of the directories, so key=value arguments are not accepted.
    """
    from ...mesh.errors import UserError, printable
    from ...report.comparison import comparison_json, summarize, write_comparison
    from ...report.page import REPORT, write_report
    from ...report.run_record import read_run
    from ...runtime.loading.find_run import find_folder

    folders = [find_folder(given) for given in arguments.runs]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise UserError(f"{twice[0]} is given twice; a run is compared with other runs. Give each run once.")
    records = [read_run(folder) for folder in folders]
    page = arguments.out or (folders[0] / REPORT if len(folders) == 1 else Path(COMPARED))
    before = page.read_bytes()[:100].lstrip().lower() if page.is_file() else b""
    if before and not before.startswith(b"<!doctype"):
        raise UserError(f"--out {page} is a file, but not an HTML page, and would be lost. Give another name.")
    if len(records) == 1:
        write_report(records[0], page)
    else:
        write_comparison(page, records)
    if arguments.json:
        print(json.dumps(comparison_json(records, page), indent=2))
    else:
        print(printable(summarize(records, page)))
    return 0


COMMAND = Command("report", "spmdkit report runs/quickstart", report, add_report, help="")
