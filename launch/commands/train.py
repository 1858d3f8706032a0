"""`spmdkit train`: trains in this process, which may be one of several."""

import argparse

from .command import Command, Print, add_config, add_fresh


def add_train(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    add_config(parser)
    add_fresh(parser)
    parser.add_argument("--list", action=Print, text=presets_text, help="name the presets, one line each, and exit")
    parser.add_argument(
        "--help-config", action=Print, text=config_text, help="list every key with its default, and exit"
    )
    parser.add_argument(
        "--help-restart", action=Print, text=restarts_text, help="list which keys may change at a restart, and exit"
    )


def presets_text() -> str:
    """What `--list` prints."""
    from ...configs.presets import describe_presets

    return describe_presets()


def config_text() -> str:
    """What `--help-config` prints."""
    from ...configs import describe_config

    return describe_config()


def restarts_text() -> str:
    """What `--help-restart` prints."""
    from ...configs.restarts import describe_restarts

    return describe_restarts()


def train(arguments: argparse.Namespace) -> int:
    """Trains in this process, which may be one of several."""
    from ...configs import load_config
    from ...training.worker import processes_in_job, simulated_by_job, starts_with_the_others
    from ..run.train import train as run
    from ..streams import outlive_output
    from ..supervision.bound import bind_to_parent

    outlive_output()
    bind_to_parent()
    with starts_with_the_others():
        processes, simulate = processes_in_job(), simulated_by_job()
        config = load_config(arguments.config, arguments.overrides, num_processes=processes, simulate=simulate)
    return run(config, fresh=arguments.fresh)


COMMAND = Command(
    "train",
    "train a model; the same command again resumes",
    "spmdkit train my.yaml train.steps=20",
    """
Trains the model of a config on its mesh, in this process. Checkpoints, metrics and report.html go to run.dir; where
that folder holds an unfinished run, training goes on from its last checkpoint.

  spmdkit train quickstart                       a language model on 8 simulated devices
  spmdkit train my.yaml train.steps=20           a file of yours, one value changed
  spmdkit train my.yaml strategy.fsdp=-1         all devices hold one copy of the state between them
  spmdkit train runs/my train.steps=200          a run by its folder, with the config that it holds
  spmdkit train my.yaml --fresh                  from step 0; what was there is moved aside, not removed
  spmdkit train --help-config                    every key, its default and what it does
  spmdkit train --help-restart                   which keys may change when a run goes on, and why others may not
""",
    add_train,
    train,
    is_run=True,
)
