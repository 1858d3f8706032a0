"""Commands for a config: `init`, `schema`, `train`, `launch`, `explain`, `verify`, `doctor`."""

import argparse
import json
import os
import sys

from .command import Command, Print, add, output_file

TARGET_HELP = (
    "accelerators that are not on this machine, such as h100:16x8 (hosts x GPUs), h100:8 (one host) or v5p:8x8x16 "
    "(shape of a slice): "
    "a100-40, a100-80, h100, h200, b200, gb200, v4, v5e, v5p, v6e, or a YAML file"
)


def add_init(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `init`."""
    parser.add_argument("preset", metavar="NAME", nargs="?", help="a preset (default: a small config with comments)")


def init(arguments: argparse.Namespace) -> int:
    """Prints a config to start from.

    It is a small config with comments, or a preset. Save it to a file, edit the file, and train it.

      spmdkit init > my.yaml                         strategy, model, data, optimizer: one line for each
      spmdkit init fsdp > my.yaml                    a preset; `spmdkit train --list` lists them
      spmdkit train my.yaml                          trains it
    """
    from ...configs.config_sources import preset_text, starter_text

    print(preset_text(arguments.preset) if arguments.preset else starter_text(), end="")
    return 0


INIT = Command("init", "spmdkit init > my.yaml", init, add_init, help="")


def print_schema(arguments: argparse.Namespace) -> int:
    """Prints the JSON schema of a config for editors.

    Editors use it to complete keys, show their descriptions and mark errors. Presets and `spmdkit init` refer to the
    schema on the documentation site in their first line; a local copy works offline:

      spmdkit schema > schema.json
      # yaml-language-server: $schema=schema.json        as the first line of the config
    """
    from ...configs.config_text import config_schema

    print(json.dumps(config_schema(), indent=2))
    return 0


SCHEMA = Command("schema", "spmdkit schema > schema.json", print_schema, lambda parser: None, help="")


def add_train(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    add(parser, "config", "overrides", "--fresh")
    for option, text, summary in (
        ("--list", "configs.config_sources:describe_presets", "list the presets and exit"),
        ("--help-config", "configs:describe_config", "list every key with its default and exit"),
        ("--help-restart", "configs.restarts:describe_restarts", "list the keys that may change at a restart and exit"),
    ):
        parser.add_argument(option, action=Print, nargs=0, const=text, help=summary)


def train(arguments: argparse.Namespace) -> int:
    """Trains a model; the same command resumes an unfinished run.

    Trains the model of a config on its mesh, in this process. Checkpoints, metrics and report.html are written to
    run.dir. If that directory contains an unfinished run, training resumes from its latest checkpoint.

      spmdkit train quickstart                       a language model on 8 simulated devices
      spmdkit train my.yaml train.steps=20           your own file, with one value changed
      spmdkit train my.yaml strategy.fsdp=-1         the state is sharded over all devices
      spmdkit train my.yaml strategy=auto            the mesh is chosen for the devices
      spmdkit train runs/my train.steps=200          a run by its directory, with the config in it
      spmdkit train my.yaml --fresh                  from step 0; the old contents are moved aside, not deleted
      spmdkit train --help-config                    every key with its default and description
      spmdkit train --help-restart                   the keys that may change when a run resumes, and why others may not
    """
    from ...configs import load_config
    from ...planning.auto_strategy import choose_strategy
    from ...report.reporter import RunReporter
    from ...runtime.build_run import prepare_devices
    from ...runtime.train import train as run
    from ..console import ignore_output_errors
    from ..startup.worker import announces_errors, count_processes, count_simulated, joins_processes

    ignore_output_errors()
    with announces_errors():
        processes, simulate = count_processes(), count_simulated()
        config = load_config(arguments.config, arguments.overrides, num_processes=processes, simulate=simulate)
        prepare_devices(config.run, config.precision, simulate)
    with joins_processes(config.timeouts, config.run.dir):
        config = choose_strategy(config, fresh=arguments.fresh)
        return run(config, fresh=arguments.fresh, reporter=RunReporter())


TRAIN = Command("train", "spmdkit train my.yaml train.steps=20", train, add_train, is_run=True)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    from ..launchers import LAUNCHERS

    add(parser, "config", "overrides", "--fresh")
    forms = "; ".join(f"{form.usage}, {form.text}" for form in LAUNCHERS.values())
    parser.add_argument("--on", metavar="LAUNCHER", help=f"launcher (required): {forms}")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    text = (
        "restart a run that died, at most K times in a row without a newer checkpoint (default: 0; slurm: 3), on "
        "kubernetes K times in total (default: 6)"
    )
    parser.add_argument("--restarts", type=int, default=0, metavar="K", help=text)


def launch(arguments: argparse.Namespace) -> int:
    """Trains in several processes, which are stopped together if one fails.

    The processes train over real collectives. The losses are those of one process with as many devices. The rank is
    printed before each line, and the output is kept in run.dir/logs. If a process fails, the others are stopped, and
    its error is printed last, before one line about all processes. The config is read once: all processes, also after
    a restart, train a copy of it in run.dir/logs, even if the file changes.

      spmdkit launch quickstart --on local:2x4       2 processes on this machine with 4 simulated devices each
      spmdkit launch my.yaml --on local:2x4 --restarts 3   a run that died restarts automatically
      spmdkit launch my.yaml --on local:2x4 --dry-run      print the command lines of the processes only
      spmdkit launch my.yaml --on ssh:hosts.yaml     the hosts of a file, over SSH
      spmdkit launch my.yaml --on slurm:gpu          a job in the partition gpu, with the sizes of the section launch
      spmdkit launch my.yaml --on mpi:hosts          mpirun on the hosts of a hostfile
      spmdkit launch my.yaml --on kubernetes         pods of a JobSet, with the sizes of that section
    """
    from ...configs.config_sources import resolve_run_directory
    from ...mesh.errors import UserError
    from ..console import ignore_output_errors
    from ..launchers import LaunchRequest, find_launcher

    ignore_output_errors()
    if arguments.restarts < 0:
        raise UserError(f"--restarts must be at least 0, got {arguments.restarts}.")
    launcher, target = find_launcher(arguments.on)
    config, overrides = resolve_run_directory(arguments.config, arguments.overrides)
    request = LaunchRequest(str(config), tuple(overrides), arguments.fresh, arguments.restarts)
    if arguments.dry_run:
        print(launcher.describe(request, target))
        return 0
    return launcher.launch(request, target)


LAUNCH = Command("launch", "spmdkit launch my.yaml --on local:2x4", launch, add_launch, is_run=True)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `explain`."""
    add(parser, "config", "overrides")
    parser.add_argument("--target", metavar="CARD:HOSTSxGPUS", help=TARGET_HELP)
    parser.add_argument("--hlo", metavar="FILE", type=output_file, help="write the scheduled HLO of the step to a file")
    add(parser, "--json")


def explain(arguments: argparse.Namespace) -> int:
    """Shows the mesh, layouts, bytes and collectives, without training.

    Lays out and compiles the run of a config. Prints the mesh, the layout of each parameter, the bytes on each device
    by kind, the memory of the compiled step, and its collectives by kind and mesh axis. With --target, also simulates
    the time of a step, and the communication that nothing hides.

      spmdkit explain quickstart                     tables
      spmdkit explain quickstart --json              for a program
      spmdkit explain my.yaml --target h100:16x8     for 16 hosts with 8 H100s each, on a machine without a GPU
      spmdkit explain my.yaml --hlo step.hlo         writes the compiled program, in the order in which it runs
    """
    from ...configs import load_config
    from ...planning.explain_run import explain as run

    config = load_config(arguments.config, arguments.overrides, sizes=arguments.target is None)
    planned = run(config, arguments.target, arguments.hlo)
    print(json.dumps(planned.to_json(), indent=2) if arguments.json else planned)
    return 0


EXPLAIN = Command("explain", "spmdkit explain my.yaml", explain, add_explain)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    add(parser, "config", "overrides")
    parser.add_argument("--target", metavar="CARD:HOSTSxGPUS", required=True, help=TARGET_HELP)
    parser.add_argument("--search", action="store_true", help="search the fastest strategy that fits")
    parser.add_argument("--write", metavar="FILE", type=output_file, help="with --search: write the best config")
    parser.add_argument("--compile", metavar="K", type=int, help="with --search: steps to compile (default: 8)")
    parser.add_argument("--seconds", metavar="S", type=float, help="with --search: the time limit (default: 840)")
    parser.add_argument("--html", metavar="FILE", type=output_file, help="write the plan as a page of one file")
    parser.add_argument(
        "--trace", metavar="FILE", type=output_file, help="write the simulated step as a trace for Perfetto"
    )
    add(parser, "--json")


def plan(arguments: argparse.Namespace) -> int:
    """Predicts the memory, traffic and time of a run on another cluster.

    Compiles the step that `train` would run for the target, on this machine, and simulates its program. Prints the
    memory of a device and whether the step fits, the collectives with the links that they cross, the time of a step,
    tokens per second, the model FLOP utilization and the communication that nothing hides. Nothing is measured: the
    efficiency factors are those of planning/kernel_time.py, the same for every prediction. Without the compiler
    (pip install 'spmdkit[targets]'), the plan is analytic.

    --search plans every mesh, pipeline schedule, number of microbatches and rematerialization that the model and the
    batch allow, by formulas, and compiles the best of them in separate processes. It prints a ranking, with the reason
    why each of the others lost. The model, the data, the global batch and the optimizer stay those of the config.

      spmdkit plan llama3_8b --target h100:1x8       8 H100s of one host
      spmdkit plan my.yaml --target h100:128x8       1,024 H100s
      spmdkit plan my.yaml --target my-card.yaml:4x8 --json
      spmdkit plan my.yaml --target h100:1x8 --trace step.json    open it in ui.perfetto.dev
      spmdkit plan my.yaml --target h100:1x8 --html plan.html
      spmdkit plan llama3_70b --target h100:8x8 --search --write best.yaml
    """
    from ...planning.separate_process import INSIDE, run_apart
    from ..supervision.lifetime import BOUND_VARIABLE, bound_to

    if arguments.is_own_process and INSIDE not in os.environ:
        return run_apart(sys.argv[1:], {BOUND_VARIABLE: bound_to(os.getpid())})
    from ...configs import load_config
    from ...mesh.errors import UserError
    from ...mesh.targets import parse_target
    from ...planning.auto_strategy import choose_strategy
    from ...planning.run_plan import plan_run
    from ...planning.search import search
    from ...report.page import write_plan_page

    given = {name: value for name in ("write", "compile", "seconds") if (value := getattr(arguments, name)) is not None}
    if given and not arguments.search:
        raise UserError(f"--{' and --'.join(given)} can be used only with --search.")
    config = load_config(arguments.config, arguments.overrides, sizes=False)
    found, ranked = None, []
    if arguments.search:
        found = search(config, arguments.target, environment={BOUND_VARIABLE: bound_to(os.getpid())}, **given)
        config, ranked = found.config, found.to_json()["ranked"]
    draws = bool(arguments.trace or arguments.html)
    if found is None or draws:
        planned = plan_run(choose_strategy(config, parse_target(arguments.target)), arguments.target, with_events=draws)
        if arguments.trace:
            planned.write_trace(arguments.trace)
        if arguments.html:
            write_plan_page(arguments.html, planned, ranked)
        found = found or planned
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found)
    return 0


PLAN = Command("plan", "spmdkit plan my.yaml --target h100:16x8", plan, add_plan)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify`."""
    add(parser, "config", "overrides")
    parser.add_argument("--full", action="store_true", help="verify the config's own sizes, not smaller ones")
    parser.add_argument("--float32", action="store_true", help="compute in float32, with a tolerance for its rounding")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps to compare (default: 3)")
    add(parser, "--json")


def verify(arguments: argparse.Namespace) -> int:
    """Compares the training of a config with that on one device.

    Checks the contract of the model, then trains a few steps twice, from the same parameters on the same data: once
    with the strategy of a config, on as many simulated CPU devices as it needs, and once in plain JAX on one device.
    Compares the loss, every gradient, their norm, the parameters and the optimizer's state after K steps, the
    collectives of the compiled step with those that the strategies predict, an evaluation, and a checkpoint restored
    onto another mesh and back. For a language model, checks that changing later tokens does not change earlier losses.
    Computes in float64, so that rounding cannot hide a mistake, and at a reduced size, which it prints. Reports the
    first difference and measures its cause. The last line states what was proved and what was not checked. Model, data,
    optimizer, clipping, accumulation and rules are those of the config.

      spmdkit verify quickstart                      the preset's mesh and strategy
      spmdkit verify my.yaml strategy.fsdp=-1        your own file with another strategy
      spmdkit verify my.yaml --steps 10 --json       more steps; for a program

    Exit code 0 if everything is equal, 1 if something differs, 2 if the config is invalid.
    """
    from ...configs import load_config
    from ...runtime.verify import verify_config

    config = load_config(arguments.config, arguments.overrides)
    result = verify_config(config, full=arguments.full, float32=arguments.float32, steps=arguments.steps)
    print(json.dumps(result.to_json(), indent=2) if arguments.json else result)
    return 0 if result.ok else 1


VERIFY = Command("verify", "spmdkit verify my.yaml", verify, add_verify)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor`."""
    add(parser, "config", nargs="?")
    add(parser, "overrides")
    add(parser, "--json")
    text = "time to wait for the other processes of a run (default: 60)"
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help=text)


def doctor(arguments: argparse.Namespace) -> int:
    """Checks this machine and job, and prints problems with their fixes.

    Checks everything that a run needs before it starts: its job (coordinator, rank, number of processes, and the
    variables they come from), versions, devices, GPUs, cores, memory, limits, the name of the host, the coordinator's
    port, and the file system of run.dir. Computes products and a sum with known results on each device, and names the
    device that is wrong. Exit code 0 without problems, 2 otherwise, with a fix for each. For a run with several
    processes, start it in all of them, like the run itself: they connect, compare versions and run.dir, and process 0
    prints the result.

      spmdkit doctor                                 this host
      spmdkit doctor my.yaml                         with the devices and the run.dir of a config
      srun spmdkit doctor my.yaml                    all tasks of an allocation together
      spmdkit doctor my.yaml --json                  for a program
    """
    from ...mesh.errors import UserError
    from ..doctor.findings import examine

    if not 0 < arguments.wait < 86400:
        raise UserError(f"--wait must be more than 0 seconds and less than a day, got {arguments.wait:g}.")
    return examine(arguments.config, arguments.overrides, as_json=arguments.json, seconds=arguments.wait)


DOCTOR = Command("doctor", "spmdkit doctor my.yaml", doctor, add_doctor)
