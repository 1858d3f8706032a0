"""Commands for the model of a run: `evaluate`, `predict`, `generate`."""

import argparse
import json
import math
from collections.abc import Sequence

from .command import TRAINED_HELP, Command, add, open_run

EVALUATION = "evaluation"


def add_split(parser: argparse.ArgumentParser) -> None:
    """Adds --split."""
    text = "the rows to use (default: evaluation)"
    parser.add_argument("--split", choices=(EVALUATION, "train"), default=EVALUATION, help=text)


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `evaluate`."""
    add(parser, "place", "overrides", "--step", "--ema")
    add_split(parser)
    text = "stop after N batches, like training with eval.batches=N (default: all)"
    parser.add_argument("--batches", type=int, metavar="N", help=text)
    add(parser, "--json")


def evaluate(arguments: argparse.Namespace) -> int:
    """Computes the loss of a trained model on evaluation or other data.

    Every row counts once, by its weight, on any mesh. Training with eval.batches=N evaluates only N batches, so its log
    refers to other rows: then the output says so, and --batches N selects the same rows. Results on the same rows are
    compared with the log of the run, and a difference is reported with both values. The mesh is that of the run if
    there are enough devices; otherwise its strategy is adapted to the available ones. One device is always enough. Data
    in other files, data.files=[...], is evaluated completely.

      spmdkit evaluate runs/quickstart               the latest checkpoint
      spmdkit evaluate runs/quickstart --step 200    another one
      spmdkit evaluate runs/quickstart 'strategy={fsdp: 8}' --json
      spmdkit evaluate runs/mine 'data.files=["new/*.txt"]'
    """
    from ...mesh.errors import UserError, counted, printable
    from ...mesh.processes import is_main_process
    from ...runtime.loading.loaded_run import LogComparison, compare_with_log

    batches = arguments.batches
    if batches is not None and batches < 1:
        raise UserError(f"--batches must be at least 1, got {batches}. Omit it to evaluate all rows.")
    with open_run(arguments) as run:
        if batches is None and "eval.batches" in (each.partition("=")[0] for each in arguments.overrides):
            batches = run.config.eval.batches or None
        source = run.source(run.splits.train if arguments.split == "train" else None)
        metrics = run.evaluate(source, max_batches=batches)
        if not is_main_process():
            return 0
        of = len(source)
        if arguments.split == EVALUATION:
            found = compare_with_log(run, of, batches, metrics)
        else:
            found = LogComparison(of if batches is None else min(of, batches * run.batch_rows))
        if arguments.json:
            facts = {"run": str(run.folder), "step": run.step, "split": arguments.split, "rows": found.rows}
            facts |= {"rows_of_split": of, "rows_in_log": found.log_rows}
            facts |= {"log": found.logged or None, "differs_from_log": bool(found.warning)}
            facts |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            print(json.dumps(facts, indent=2))
            return 0
        width = max(map(len, metrics))
        rows = f"all {of:,} rows" if found.rows == of else f"{found.rows:,} of {of:,} rows"
        rows += f", {counted(-(-found.rows // run.batch_rows), 'batch', 'batches')} of {run.batch_rows:,}"
        is_same = found.log_rows is not None and not found.remark and not found.warning
        lines = [
            f"{run.title}\n{run.splits.description}",
            f"{arguments.split} split: {rows}{', as in the log of the run' if is_same else ''}",
            *(f"  {name:<{width}}  {value:.6g}" for name, value in metrics.items()),
            *([found.remark] if found.remark else []),
            *([f"warning: {found.warning}"] if found.warning else []),
        ]
        print(printable("\n".join(lines)))
    return 0


EVALUATE = Command("evaluate", "spmdkit evaluate runs/quickstart", evaluate, add_evaluate, TRAINED_HELP)


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `predict`."""
    add(parser, "place", "overrides", "--step", "--ema")
    parser.add_argument("--out", metavar="FILE.npz", required=True, help="the file to write")
    add_split(parser)
    text = "arrays of the data to include, such as targets,weights"
    parser.add_argument("--keep", metavar="NAMES", default="", help=text)
    parser.add_argument("--force", action="store_true", help="replace earlier predictions")
    add(parser, "--json")


def predict(arguments: argparse.Namespace) -> int:
    """Writes the predictions of a trained model for each row to a .npz file.

    The rows are those of the evaluation split, in order. The results of the model's `predict` are the array
    `predictions` of the file; if it returns a tree, one array for each leaf. Batches are written one by one, so that
    memory use does not grow. The number of rows is that of the data, on any mesh.

      spmdkit predict runs/mlp --out predictions.npz --keep targets
      spmdkit predict runs/mlp --out new.npz data.source=arrays 'data.files=["new.npz"]'
    """
    from pathlib import Path

    from ...checkpoints.directory import display_path
    from ...mesh.errors import printable
    from ...mesh.processes import is_main_process
    from ...runtime.loading.rows_file import check_rows_file, write_rows

    target = check_rows_file(Path(arguments.out), force=arguments.force)
    keep = [name for name in arguments.keep.split(",") if name]
    with open_run(arguments) as run:
        source = run.source(run.splits.train if arguments.split == "train" else None)
        batches = run.predictions(source, keep=keep)
        if not is_main_process():
            for _ in batches:  # all processes compute; one writes
                pass
            return 0
        if not arguments.json:
            print(printable(f"{run.title}\n{run.splits.description}"), flush=True)
        shapes = write_rows(target, len(source), batches)
        if arguments.json:
            facts = {"run": str(run.folder), "step": run.step, "file": str(target), "arrays": shapes}
            print(json.dumps(facts, indent=2))
        else:
            each = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
            print(printable(f"Wrote {display_path(target)}: {each}."))
    return 0


PREDICT = Command("predict", "spmdkit predict runs/mlp --out predictions.npz", predict, add_predict, TRAINED_HELP)


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`."""
    add(parser, "place")
    parser.add_argument("word", metavar="PROMPT", nargs="?", help="the text to continue (default: sample.prompt)")
    add(parser, "overrides", "--step", "--ema")
    parser.add_argument("--length", type=int, metavar="N", help="tokens to generate (default: sample.length)")
    text = "sampling temperature, 0 = the most likely token (default: sample.temperature)"
    parser.add_argument("--temperature", type=float, metavar="T", help=text)
    parser.add_argument("--seed", type=int, metavar="S", help="the random seed (default: run.seed)")
    add(parser, "--json")


def generate(arguments: argparse.Namespace) -> int:
    """Continues a prompt with the language model of a run.

    The prompt is text if the run was trained on text, as bytes or with data.tokenizer; otherwise it consists of token
    ids, "17 4 256", and ids are printed. If it looks like key=value, give it as sample.prompt=PROMPT. The same seed
    samples the same tokens on every mesh, up to rounding.

      spmdkit generate runs/quickstart "def main" --length 100
      spmdkit generate runs/quickstart --temperature 0
      spmdkit generate runs/quickstart "def main" --seed 1 run.simulate=0
    """
    from ...mesh.errors import printable
    from ...mesh.processes import is_main_process

    prompt, arguments.overrides = split_prompt(arguments.word, arguments.overrides)
    given = {
        "sample.length": arguments.length,
        "sample.temperature": arguments.temperature,
        "run.seed": arguments.seed,
    }
    arguments.overrides += [f"{key}={value}" for key, value in given.items() if value is not None]
    with open_run(arguments) as run:
        tokens = run.generate(prompt)
        if not is_main_process():
            return 0
        if arguments.json:
            print(json.dumps({"run": str(run.folder), "step": run.step, "tokens": tokens, "text": run.text(tokens)}))
        else:
            print(printable(run.text(tokens)))
    return 0


def split_prompt(word: str | None, others: Sequence[str]) -> tuple[str | None, list[str]]:
    """Separates the prompt from `key=value` arguments, in any order.

    Args:
        word: The first argument after the run, or None.
        others: The arguments after it.

    Returns:
        The prompt or None, and the `key=value` arguments.

    Raises:
        UserError: There is more than one prompt.
    """
    from ...mesh.errors import UserError
    from .suggestions import is_override

    words = [each for each in (word, *others) if each is not None]
    prompts = [each for each in words if not is_override(each)]
    if len(prompts) > 1:
        raise UserError(
            f"spmdkit generate takes one PROMPT, got {len(prompts)}: {', '.join(map(repr, prompts))}. Quote a prompt "
            "of several words; values of the config are key=value, such as run.simulate=0."
        )
    return next(iter(prompts), None), [each for each in words if is_override(each)]


GENERATE = Command("generate", 'spmdkit generate runs/quickstart "def main"', generate, add_generate, TRAINED_HELP)
