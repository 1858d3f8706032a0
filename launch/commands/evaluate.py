"""`spmdkit evaluate`: the loss of a run's model on its evaluation split, or on other data."""

import argparse

from .command import TRAINED_HELP, Command, add_json, add_trained


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `evaluate`."""
    add_trained(parser)
    add_split(parser)
    parser.add_argument("--batches", type=int, metavar="N", help="stop after N batches; by default all rows")
    add_json(parser)


def add_split(parser: argparse.ArgumentParser) -> None:
    """Adds --split."""
    parser.add_argument(
        "--split", choices=("evaluation", "train"), default="evaluation", help="which rows (evaluation)"
    )


def evaluate(arguments: argparse.Namespace) -> int:
    """Prints the loss of a run's model."""
    import json
    import math

    from ...mesh.processes import is_main_process
    from ...mesh.text import printable
    from ..finished.load import loaded

    with loaded(arguments.place, arguments.step, arguments.overrides, ema=arguments.ema) as run:
        source = run.source(run.splits.train if arguments.split == "train" else None)
        metrics = run.evaluate(source, max_batches=arguments.batches)
        rows = min(len(source), (arguments.batches or len(source)) * run.batch_rows)
        if not is_main_process():
            return 0
        if arguments.json:
            facts = {"run": str(run.folder), "step": run.step, "split": arguments.split, "rows": rows}
            finite = {
                name: value if math.isfinite(value) else None for name, value in metrics.items()
            }  # JSON has no NaN
            print(json.dumps({**facts, **finite}, indent=2))
            return 0
        print(printable(f"{run.title}\n{run.splits.description}"))
        print(f"{arguments.split} split, {rows:,} rows")
        width = max(map(len, metrics))
        for name, value in metrics.items():
            print(f"  {name:<{width}}  {value:.6g}")
    return 0


COMMAND = Command(
    "evaluate",
    "the loss of a trained model on its evaluation split, or other data",
    "spmdkit evaluate runs/quickstart",
    """
Loads the model of a run and prints its loss on the evaluation split: every row once, by its weight, whatever the mesh.
The mesh is that of the run where there are as many devices, or its strategy fitted to those that there are; one device
always works. Data in other files, data.files=[...], is evaluated whole.

  spmdkit evaluate runs/quickstart               the newest checkpoint
  spmdkit evaluate runs/quickstart --step 200    another one
  spmdkit evaluate runs/quickstart 'strategy={fsdp: 8}' --json
  spmdkit evaluate runs/mine 'data.files=["new/*.txt"]'
""",
    add_evaluate,
    evaluate,
    TRAINED_HELP,
)
