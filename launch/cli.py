"""The command line: `spmdkit init`, `train`, `launch`, `explain`, `verify`, `schedule`.

Each command is one line of COMMANDS. What a command needs is imported when it runs, so that help is instant.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from .streams import open_closed_streams, restart_in_utf8, tolerant_streams, too_little_memory

CONFIG_HELP = """
CONFIG is a YAML file, or the name of a preset that comes with spmdkit (quickstart). key=value arguments lay single
values over it; the value is YAML:

  train.steps=20  strategy.fsdp=2  'strategy={fsdp: 4, data: 2}'  'data.files=["corpus/**/*.txt"]'
"""

SCHEDULE_HELP = """
schedules:
  gpipe             all forwards, then all backwards                    time 3(M+S-1)      holds M microbatches
  1f1b              one forward, one backward in turn                   time 3(M+S-1)      holds S-s on stage s
  interleaved_1f1b  1f1b with V chunks of the model on each stage       time 3(M+(S-1)/V)  holds S-s/V
  zb_h1             1f1b, each gradient passed on before its weights    time 3M+S-1        holds S
  zbv               two chunks a stage, down the stages and up again    time 3M+(S-1)/2    holds S

An action is F (forward), R (forward again), B (backward to the input) or W (backward to the weights), and takes a tick.
A tick lasts as long as its slowest action; with V chunks each costs 1/V. In a CSV file a line is a stage and a cell a
tick: F0, B3, W3, R2, F0.1 (microbatch 0, chunk 1), or empty; `# placement: v` and `# joint: true` may stand on top.
"""

TRY_AGAIN = 75
"""As in training/exits.py, which a help text cannot wait for."""
MOST_STEPS = 1000
"""That `verify` compares."""

WHAT_IT_IS = """
Distributed training for JAX: write a loss for one device, name the mesh in
YAML, train on N devices.

start here:
  spmdkit train quickstart

commands, an example of each:
{commands}
CONFIG is a YAML file or a preset (spmdkit train --list); any key of it can be
given as key=value. `spmdkit COMMAND --help` says more of a command, `spmdkit
train --help-config` lists every key.
"""

EXIT_CODES = """
exit codes: 0 finished, 1 an unforeseen error, 2 a mistake to correct, 3 diverged or bad data, 75 stopped: try again.
SPMDKIT_TRACEBACK=1 shows the traceback of a mistake as well.
"""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every command that reads a config."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file or the name of a preset")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="values laid over those of the file"
    )


def add_fresh(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start anew: what run.dir holds of a run, but its logs, is moved to run.dir.old-1 (-2, ...)",
    )


def add_init(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `init`."""
    parser.add_argument("preset", metavar="NAME", nargs="?", help="a preset; by default a small config with comments")


def init(arguments: argparse.Namespace) -> int:
    """Prints a config to begin with."""
    from ..configs.load import find_preset
    from ..configs.presets import STARTER, preset_text

    print(preset_text(find_preset(arguments.preset)) if arguments.preset else STARTER, end="")
    return 0


def add_train(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    add_config(parser)
    add_fresh(parser)
    parser.add_argument("--list", action=Print, text=presets_text, help="name the presets, one line each, and exit")
    parser.add_argument(
        "--help-config", action=Print, text=config_text, help="list every key with its default, and exit"
    )


def presets_text() -> str:
    """What `--list` prints."""
    from ..configs.presets import describe_presets

    return describe_presets()


def config_text() -> str:
    """What `--help-config` prints."""
    from ..configs import describe_config

    return describe_config()


def version_text() -> str:
    """What `--version` prints: what a report of an error has to say."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("spmdkit", "jax", "jaxlib"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join([*found, f"Python {platform.python_version()}"]) + "\n"


def train(arguments: argparse.Namespace) -> int:
    """Trains in this process, which may be one of several."""
    from ..configs import load_config
    from ..training.worker import processes_in_job, simulated_by_job
    from .train import train as run

    processes, simulate = processes_in_job(), simulated_by_job()
    config = load_config(arguments.config, arguments.overrides, num_processes=processes, simulate=simulate)
    return run(config, fresh=arguments.fresh)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    add_config(parser)
    add_fresh(parser)
    parser.add_argument("--on", required=True, metavar="local:PxD", help="P processes with D simulated devices each")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start a run that died again, at most K times in a row without a newer checkpoint (0)",
    )


def launch(arguments: argparse.Namespace) -> int:
    """Trains in several processes."""
    from ..mesh.errors import UserError
    from .local import launch as run
    from .target import parse_target

    restarts = arguments.restarts
    if restarts < 0:
        raise UserError(f"--restarts {restarts}: give 0 or more restarts without a newer checkpoint.")
    target = parse_target(arguments.on)
    return run(arguments.config, arguments.overrides, target, fresh=arguments.fresh, restarts=restarts)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `explain`."""
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def explain(arguments: argparse.Namespace) -> int:
    """Prints what a run will hold and move."""
    import json

    from ..configs import load_config
    from .explain import explain as run

    explanation = run(load_config(arguments.config, arguments.overrides))
    print(json.dumps(explanation.to_json(), indent=2) if arguments.json else explanation)
    return 0


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

    from ..configs import load_config
    from ..mesh.errors import UserError
    from .verify import verify_config as run

    config = load_config(arguments.config, arguments.overrides)
    if arguments.steps > MOST_STEPS:
        raise UserError(f"--steps {arguments.steps}: at most {MOST_STEPS}; a mistake shows in the first few.")
    result = run(config, full=arguments.full, float32=arguments.float32, steps=arguments.steps)
    print(json.dumps(result.to_json(), indent=2) if arguments.json else result)
    return 0 if result.ok else 1


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `schedule`."""
    parser.add_argument("name", metavar="NAME", help="a schedule, or the path of a CSV file of your own")
    parser.add_argument("--stages", metavar="S", type=int, help="stages of the pipeline: strategy.pipe.size")
    parser.add_argument("--microbatches", metavar="M", type=int, help="microbatches of a batch, at least S")
    parser.add_argument("--virtual", metavar="V", type=int, help="chunks of the model on each stage")
    parser.add_argument("--recompute", action="store_true", help="compute each forward again for its backward")
    parser.add_argument(
        "--costs", metavar="F,B,W", default="1,1,1", help="of a stage's forward, backward to input, to weights"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw it there as well")
    parser.add_argument("--csv", metavar="FILE", help="write its table there, to be changed and read again")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a drawing")


def schedule(arguments: argparse.Namespace) -> int:
    """Draws and times a pipeline schedule."""
    from .schedule import run

    return run(arguments)


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        name: What is typed.
        summary: One line for the list of commands.
        example: One command line to try it with.
        text: What it does and what for, with examples.
        add_arguments: Adds its arguments to its parser.
        run: Does it; returns the exit code.
        help: What stands at the end of its help, before the exit codes.
    """

    name: str
    summary: str
    example: str
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str = CONFIG_HELP


COMMANDS = (
    Command(
        "init",
        "print a config to begin with",
        "spmdkit init > my.yaml",
        """
Prints a small config with comments, or a preset. Write it to a file, change it, train it.

  spmdkit init > my.yaml                         strategy, model, data, optimizer: a line on each
  spmdkit init fsdp > my.yaml                    a preset; `spmdkit train --list` names them
  spmdkit train my.yaml                          trains it
""",
        add_init,
        init,
        "",
    ),
    Command(
        "train",
        "train a model; the same command again resumes",
        "spmdkit train my.yaml train.steps=20",
        """
Trains the model of a config on its mesh, in this process. Checkpoints, metrics and report.html go to run.dir; where
that folder holds an unfinished run, training goes on from its last checkpoint.

  spmdkit train quickstart                       a language model on 8 simulated devices
  spmdkit train my.yaml train.steps=20           a file of yours, one value changed
  spmdkit train my.yaml strategy.fsdp=-1         all devices hold one copy of the state between them
  spmdkit train my.yaml --fresh                  from step 0; what was there is moved aside, not removed
  spmdkit train --help-config                    every key, its default and what it does
""",
        add_train,
        train,
    ),
    Command(
        "launch",
        "train in several processes, stopped together when one fails",
        "spmdkit launch my.yaml --on local:2x4",
        """
Starts processes that train together over real collectives, and gives the losses of one process with as many devices.
Lines are printed after their rank and kept in run.dir/logs. When a process fails, the others are stopped and the last
lines are its own.

  spmdkit launch quickstart --on local:2x4       2 processes here, 4 simulated devices each
  spmdkit launch my.yaml --on local:2x4 --restarts 3   a run that died goes on by itself
""",
        add_launch,
        launch,
    ),
    Command(
        "explain",
        "show the mesh, layouts, bytes and collectives, without training",
        "spmdkit explain my.yaml",
        """
Lays out and compiles the run of a config and shows the mesh, where each parameter lives, the bytes on each device by
kind, the memory of the compiled step, and its collectives by kind and mesh axis. Nothing is trained.

  spmdkit explain quickstart                     as tables
  spmdkit explain quickstart --json              for a program to read
""",
        add_explain,
        explain,
    ),
    Command(
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
    ),
    Command(
        "schedule",
        "draw a pipeline schedule; its time, bubble and memory",
        "spmdkit schedule 1f1b --stages 4 --microbatches 8",
        """
Draws which stage of a pipeline does what at each tick, and says what it costs: the time of a step, the share of it in
which stages are idle, and the most activations each stage holds at once. Nothing is compiled, no device is used.

  spmdkit schedule 1f1b --stages 4 --microbatches 8
  spmdkit schedule interleaved_1f1b --stages 4 --microbatches 8 --virtual 2      two chunks a stage: half the bubble
  spmdkit schedule zb_h1 --stages 4 --microbatches 8 --costs 1,1.2,0.8           costs that you have measured
  spmdkit schedule zbv --stages 4 --microbatches 8 --svg zbv.svg                 a picture
  spmdkit schedule gpipe --stages 4 --microbatches 8 --recompute --json          for a program to read
  spmdkit schedule 1f1b --stages 2 --microbatches 4 --csv mine.csv               the table, for you to change
  spmdkit schedule mine.csv                                                      checked, timed and drawn
""",
        add_schedule,
        schedule,
        SCHEDULE_HELP,
    ),
)


class Print(argparse.Action):
    """Prints a text and exits. The text is made when it is asked for: that may take a second."""

    def __init__(self, option_strings: list[str], dest: str, text: Callable[[], str], **options: object) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)  # pyright: ignore[reportArgumentType]
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        """Called by argparse where the option is given."""
        print(self.text(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Argparse's parser; arguments that it quotes cannot change the terminal."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse where an argument is wrong."""
        from ..mesh.text import printable

        super().error(printable(message))


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the first word: which command."""
    shown = "".join(f"  {command.example}\n      {command.summary}\n" for command in COMMANDS)
    parser = Parser(
        prog="spmdkit",
        usage="spmdkit COMMAND [CONFIG] [key=value ...] [options]",
        description=WHAT_IT_IS.format(commands=shown),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Print, text=version_text, help="print the versions, and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def find_command(name: str, parser: argparse.ArgumentParser) -> "Command":
    """Returns the command of a name; where there is none, exits with what is near, or how to train a config."""
    commands = {command.name: command for command in COMMANDS}
    if name not in commands:
        from ..configs.presets import preset_names
        from ..mesh.near_miss import nearest

        near = nearest(name, commands)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
        if name.endswith((".yaml", ".yml")) or name in preset_names():
            hint = f"to train it: spmdkit train {name}"
        parser.error(f"{name!r} is not a command; {hint}")
    return commands[name]


def make_command_parser(command: Command) -> argparse.ArgumentParser:
    """Builds the parser of the arguments of one command."""
    parser = Parser(
        prog=f"spmdkit {command.name}",
        description=command.text,
        epilog=command.help + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def parse_arguments(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments of a command; exits with code 2, and with what to write instead, where they are wrong."""
    parser = make_command_parser(command)
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown and "overrides" not in arguments:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        from .options import explain_unknown

        parser.error(explain_unknown(unknown, words))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Arguments without the program's name; None = the process's own.

    Returns:
        The exit code: see training/exits.py.
    """
    if argv is None:
        restart_in_utf8()
        open_closed_streams()
    with tolerant_streams():
        parser = make_parser()
        first = parser.parse_args(argv)
        if first.command in (None, "help"):
            parser.print_help()
            return 0
        command = find_command(first.command, parser)
        arguments = parse_arguments(command, first.rest)
        problem = too_little_memory()
        if problem:
            print(f"error: {problem}", file=sys.stderr)
            return TRY_AGAIN
        try:
            code = command.run(arguments)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            from ..training.exits import report_error

            return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
