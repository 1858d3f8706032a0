"""`spmdkit generate`: what a language model that was trained writes."""

import argparse
from collections.abc import Sequence

from .command import OR_CONFIG, TRAINED_HELP, Command, add_ema, add_json, add_overrides, add_run, add_step


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`."""
    add_run(parser, also=OR_CONFIG)
    parser.add_argument("word", metavar="PROMPT", nargs="?", help="what to continue; by default sample.prompt")
    add_overrides(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="a PROMPT that reads like key=value")
    add_step(parser, "the newest")
    add_ema(parser)
    parser.add_argument("--length", type=int, metavar="N", help="tokens to generate; by default sample.length")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = the likeliest token; sample.temperature")
    parser.add_argument("--seed", type=int, metavar="S", help="of the draws; by default run.seed")
    add_json(parser)


def generate(arguments: argparse.Namespace) -> int:
    """Prints a prompt and how a run's model continues it."""
    import json

    from ...mesh.processes import is_main_process
    from ...mesh.text import printable
    from ..finished.load import loaded

    prompt, overrides = prompt_and_overrides(arguments.word, arguments.overrides, arguments.prompt)
    options = {
        "sample.length": arguments.length,
        "sample.temperature": arguments.temperature,
        "run.seed": arguments.seed,
    }
    overrides += [f"{key}={value}" for key, value in options.items() if value is not None]  # checked as these keys are
    with loaded(arguments.place, arguments.step, overrides, ema=arguments.ema) as run:
        tokens = run.generate(
            run.tokens(prompt),
            length=arguments.length,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        if not is_main_process():
            return 0
        if arguments.json:
            print(json.dumps({"run": str(run.folder), "step": run.step, "tokens": tokens, "text": run.text(tokens)}))
        else:
            print(printable(run.text(tokens)))
    return 0


def prompt_and_overrides(
    word: str | None, others: Sequence[str], given: str | None = None
) -> tuple[str | None, list[str]]:
    """Tells the prompt from what is laid over the config, in whatever order they are typed.

    Args:
        word: The first word after the run; None where there is none.
        others: Those after it.
        given: The prompt of `--prompt`.

    Returns:
        The prompt, None where there is none; and `key=value`, each of a section that there is.

    Raises:
        UserError: There is more than one prompt.
    """
    from ...mesh.errors import UserError
    from ..options import is_override

    words = [each for each in (word, *others) if each is not None]
    prompts = [each for each in words if not is_override(each)] + ([] if given is None else [given])
    if len(prompts) > 1:
        raise UserError(
            f"spmdkit generate takes one PROMPT, and these are {len(prompts)}: {', '.join(map(repr, prompts))}. Put a "
            "prompt of several words into quotes; values of the config are key=value, such as run.simulate=0."
        )
    return next(iter(prompts), None), [each for each in words if is_override(each)]


COMMAND = Command(
    "generate",
    "continue a prompt with a trained language model",
    'spmdkit generate runs/quickstart "def main" --length 100',
    """
Loads the language model of a run and prints a prompt with its continuation. The prompt is text if the run was trained
on text, as bytes or with data.tokenizer; else token ids, "17 4 256", and ids are printed. The same seed draws the same
on every mesh, up to rounding.

  spmdkit generate runs/quickstart "def main" --length 100
  spmdkit generate runs/quickstart --temperature 0
  spmdkit generate runs/quickstart "def main" --seed 1 run.simulate=0
""",
    add_generate,
    generate,
    TRAINED_HELP,
)
