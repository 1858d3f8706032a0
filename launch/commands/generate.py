"""`spmdkit generate`: what a language model that was trained writes."""

import argparse

from .command import RUN_HELP, Command, add_ema, add_json, add_run, add_step


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`."""
    add_run(parser, also="; or a config whose run.dir holds a run")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to continue; by default sample.prompt")
    add_step(parser, "the newest")
    add_ema(parser)
    parser.add_argument("--length", type=int, metavar="N", help="tokens to generate; by default sample.length")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = the likeliest token; sample.temperature")
    parser.add_argument("--seed", type=int, metavar="S", help="of the draws; by default run.seed")
    parser.add_argument(
        "--set", metavar="key=value", action="append", default=[], help="of the config; may be repeated"
    )
    add_json(parser)


def generate(arguments: argparse.Namespace) -> int:
    """Prints a prompt and how a run's model continues it."""
    import json

    from ...mesh.processes import is_main_process
    from ...mesh.text import printable
    from ..finished.load import loaded

    with loaded(arguments.place, arguments.step, arguments.set, ema=arguments.ema) as run:
        tokens = run.generate(
            run.tokens(arguments.prompt),
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


COMMAND = Command(
    "generate",
    "continue a prompt with a trained language model",
    'spmdkit generate runs/quickstart "def main" --length 100',
    """
Loads the language model of a run and prints a prompt with its continuation. The prompt is text where tokens are bytes;
else token ids, "17 4 256", and ids are printed. The same seed draws the same on every mesh, up to rounding.

  spmdkit generate runs/quickstart "def main" --length 100
  spmdkit generate runs/quickstart --temperature 0
  spmdkit generate runs/quickstart --seed 1 --set run.simulate=0
""",
    add_generate,
    generate,
    RUN_HELP,
)
