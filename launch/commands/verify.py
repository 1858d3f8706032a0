"""`spmdkit verify`: the training of a config beside that of one device."""

import argparse

from .command import Command, add_config

MOST_STEPS = 1000
"""That `verify` compares."""


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify`."""
    add_config(parser)
    parser.add_argument("--full", action="store_true", help="verify the config's own sizes, not smaller ones")
    parser.add_argument("--float32", action="store_true", help="compute in float32 and allow for its rounding")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps to compare after (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def verify(arguments: argparse.Namespace) -> int:
    """Compares the training of a config with that of one device; 1 where they differ."""
    import json

    from ...configs import load_config
    from ...mesh.errors import UserError
    from ..run.verify import verify_config as run

    config = load_config(arguments.config, arguments.overrides)
    if arguments.steps > MOST_STEPS:
        raise UserError(f"--steps {arguments.steps}: at most {MOST_STEPS}; a mistake shows in the first few.")
    result = run(config, full=arguments.full, float32=arguments.float32, steps=arguments.steps)
    print(json.dumps(result.to_json(), indent=2) if arguments.json else result)
    return 0 if result.ok else 1


COMMAND = Command(
    "verify",
    "compare the training of a config with that of one device",
    "spmdkit verify my.yaml",
    """
Trains a few steps twice, from the same parameters on the same data: under the strategy of a config, on as many
simulated CPU devices as it needs, and in plain JAX on one. Compares the loss, every gradient, their norm, the
parameters and the optimizer's state after K steps, the collectives of the compiled step with those that the strategies
predict, an evaluation, and a checkpoint restored onto another mesh and back. Changes later tokens of a language model,
which may change no earlier loss. Computes in float64, where rounding cannot hide a mistake, and at a reduced size that
it states. Names the first thing that differs, and measures its cause. The last line says what is proved, and what was
not looked at. Model, data, optimizer, clipping, accumulation and rules are those of the config.

  spmdkit verify quickstart                      the preset's mesh and strategy
  spmdkit verify my.yaml strategy.fsdp=-1        a file of yours under another strategy
  spmdkit verify my.yaml --steps 10 --json       more steps; for a program to read

Ends with 0 where everything is equal, 1 where something differs, 2 where the config cannot work.
""",
    add_verify,
    verify,
)
