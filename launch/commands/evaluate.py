"""`spmdkit evaluate`: the loss of a run's model on its evaluation split, or on other data."""

import argparse
from collections.abc import Mapping
from typing import Any

from .command import TRAINED_HELP, Command, add_json, add_trained

EVALUATION = "evaluation"


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `evaluate`."""
    add_trained(parser)
    add_split(parser)
    parser.add_argument(
        "--batches", type=int, metavar="N", help="stop after N batches, as training with eval.batches=N; default: all"
    )
    add_json(parser)


def add_split(parser: argparse.ArgumentParser) -> None:
    """Adds --split."""
    parser.add_argument("--split", choices=(EVALUATION, "train"), default=EVALUATION, help="which rows (evaluation)")


def evaluate(arguments: argparse.Namespace) -> int:
    """Prints the loss of a run's model, of which rows it is, and of which the log of the run has figures."""
    from ...mesh.errors import UserError
    from ...mesh.processes import is_main_process
    from ...mesh.text import printable
    from ..finished.extent import difference_from_log, extent_of, log_of_same_rows, logged_metrics, other_parameters
    from ..finished.load import loaded

    batches = arguments.batches
    if batches is not None and batches < 1:
        raise UserError(f"--batches {batches}: at least 1 batch is evaluated. Leave it out for all rows.")
    with loaded(arguments.place, arguments.step, arguments.overrides, ema=arguments.ema) as run:
        if batches is None and "eval.batches" in (each.partition("=")[0] for each in arguments.overrides):
            batches = run.config.eval.batches or None
        log = log_of_same_rows(run.folder, run.config) if arguments.split == EVALUATION else None
        source = run.source(run.splits.train if arguments.split == "train" else None)
        metrics = run.evaluate(source, max_batches=batches)
        if not is_main_process():
            return 0
        extent = extent_of(len(source), run.batch_rows, batches, log)
        other = other_parameters(run.ema, log)
        comparable = extent.logged_rows == extent.rows and not other
        logged = logged_metrics(run.folder, run.step) if comparable else {}
        differs = difference_from_log(metrics, logged, run.config.precision.compute)
        if arguments.json:
            facts = {"run": str(run.folder), "step": run.step, "split": arguments.split, "rows": extent.rows}
            facts |= {"rows_of_split": extent.of, "rows_in_log": extent.logged_rows}
            print(_as_json({**facts, "log": logged or None, "differs_from_log": bool(differs)}, metrics))
            return 0
        lines = [
            f"{run.title}\n{run.splits.description}",
            f"{arguments.split} split: {extent.text(same_values=not differs)}",
        ]
        lines += _table(metrics)
        lines += filter(None, (extent.difference, other, differs))
        print(printable("\n".join(lines)))
    return 0


def _as_json(facts: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    import json
    import math

    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
    return json.dumps({**facts, **finite}, indent=2)


def _table(metrics: Mapping[str, float]) -> list[str]:
    width = max(map(len, metrics))
    return [f"  {name:<{width}}  {value:.6g}" for name, value in metrics.items()]


COMMAND = Command(
    "evaluate",
    "the loss of a trained model on its evaluation split, or other data",
    "spmdkit evaluate runs/quickstart",
    """
Loads the model of a run and prints its loss on the evaluation split: every row once, by its weight, whatever the mesh.
Training with eval.batches=N looks at N batches alone, so that its figures are of other rows: then the output says so,
and --batches N takes the same. Values of the same rows are compared with the log of the run, and a difference is
reported with both. The mesh is that of the run where there are as many devices, or its strategy fitted to
those that there are; one device always works. Data in other files, data.files=[...], is evaluated whole.

  spmdkit evaluate runs/quickstart               the newest checkpoint
  spmdkit evaluate runs/quickstart --step 200    another one
  spmdkit evaluate runs/quickstart 'strategy={fsdp: 8}' --json
  spmdkit evaluate runs/mine 'data.files=["new/*.txt"]'
""",
    add_evaluate,
    evaluate,
    TRAINED_HELP,
)
