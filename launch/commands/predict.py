"""`spmdkit predict`: what a run's model predicts, row by row, as a .npz file."""

import argparse

from .command import TRAINED_HELP, Command, add_json, add_trained
from .evaluate import add_split


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `predict`."""
    add_trained(parser)
    parser.add_argument("--out", metavar="FILE.npz", required=True, help="the file to write")
    add_split(parser)
    parser.add_argument(
        "--keep", metavar="NAMES", default="", help="arrays of the data to write beside, such as targets,weights"
    )
    parser.add_argument("--force", action="store_true", help="replace earlier predictions")
    add_json(parser)


def predict(arguments: argparse.Namespace) -> int:
    """Writes what a run's model predicts."""
    import json
    from pathlib import Path

    from ...mesh.processes import is_main_process
    from ...mesh.text import printable
    from ..finished.load import loaded
    from ..finished.rows_file import check_rows_file, write_rows

    target = check_rows_file(Path(arguments.out), force=arguments.force)
    keep = [name for name in arguments.keep.split(",") if name]
    with loaded(arguments.place, arguments.step, arguments.overrides, ema=arguments.ema) as run:
        source = run.source(run.splits.train if arguments.split == "train" else None)
        batches = run.predictions(source, keep=keep)
        if not is_main_process():
            for _ in batches:  # all processes compute; one writes
                pass
            return 0
        if not arguments.json:
            print(printable(f"{run.title}\n{run.splits.description}"), flush=True)
        written = write_rows(target, len(source), batches)
        if arguments.json:
            arrays = {name: list(shape) for name, shape in written.shapes.items()}
            print(
                json.dumps({"run": str(run.folder), "step": run.step, "file": str(target), "arrays": arrays}, indent=2)
            )
        else:
            print(printable(str(written)))
    return 0


COMMAND = Command(
    "predict",
    "what a trained model predicts for each row, as a .npz file",
    "spmdkit predict runs/mlp --out predictions.npz",
    """
Loads the model of a run and writes what its `predict` returns for every row of the evaluation split, in order, as the
array `predictions` of a .npz file; where it returns a tree, one array for each leaf. Batch after batch goes to the
file: no more is in memory. As many rows come out as went in, on any mesh.

  spmdkit predict runs/mlp --out predictions.npz --keep targets
  spmdkit predict runs/mlp --out new.npz data.source=arrays 'data.files=["new.npz"]'
""",
    add_predict,
    predict,
    TRAINED_HELP,
)
