"""Several processes load one checkpoint, whichever each of them takes for the newest."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import wait
from runs import environment
from spmdkit.launch.finished import agreed
from spmdkit.launch.finished.place import find_run
from spmdkit.launch.supervision.ports import free_port
from spmdkit.training.checkpointing.errors import CheckpointError
from spmdkit.training.worker import Job, job_environment

import spmdkit

BLIND = """
import os, sys
from spmdkit.launch.inspection import finding

if os.environ["SPMDKIT_PROCESS_ID"] == sys.argv[1]:
    before = finding.contents
    finding.contents = lambda directory: (lambda found: found._replace(steps=found.steps[:1]))(before(directory))

from spmdkit.launch.cli import main

sys.exit(main(sys.argv[2:]))
"""
"""A command in which one rank does not see the newest checkpoint yet, as on another host."""


def of_two(blind: int, *words: str | Path):
    """Runs a command in two processes, one of which sees the first checkpoint alone."""
    address = f"127.0.0.1:{free_port()}"
    jobs = [Job(address, 2, rank, 4) for rank in range(2)]
    command = [sys.executable, "-c", BLIND, str(blind), *map(str, words)]
    return wait(
        [
            subprocess.Popen(
                command,
                env=environment(**job_environment(job)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for job in jobs
        ]
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_process_0_says_which(folder):
    first, second = of_two(0, "evaluate", folder, "--json", "--batches", "1")
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    found = re.search(r'"step": (\d+),.*"loss": ([\d.]+)', first.stdout, re.DOTALL)  # after lines of Gloo
    assert found is not None
    loss = spmdkit.load_run(folder, step=4).evaluate(max_batches=1)["loss"]
    assert (int(found[1]), float(found[2])) == (4, pytest.approx(loss, rel=1e-6)), "each has copies of its own"


def test_alone_it_is_the_newest(folder):
    assert agreed.agreed_checkpoint(find_run(folder), 1).name == "8"
    assert agreed.agreed_checkpoint(find_run(folder, 4), 1).name == "4"


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is rank 1, and rank 0 says what the list holds."""
    told: list[str] = []
    monkeypatch.setattr(agreed.jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreed.jax, "process_index", lambda: 1)
    monkeypatch.setattr(agreed, "told_by_first", lambda name, text, seconds: told.pop(0))
    monkeypatch.setattr(agreed, "SEE_SECONDS", 0.5)
    return told


def test_what_is_not_seen_here_is_waited_for_and_told(second_of_two, folder, tmp_path):
    second_of_two += ["4", "12", ""]
    copied = shutil.copytree(folder, tmp_path / "run")
    place = find_run(copied)
    assert agreed.agreed_checkpoint(place, 1) == copied / "checkpoints" / "4"
    with pytest.raises(CheckpointError, match=r"Rank 0 loads the checkpoint .*/checkpoints/12, and rank 1 sees none"):
        agreed.agreed_checkpoint(place, 1)
    with pytest.raises(CheckpointError, match=r"There is no complete checkpoint in .*, as rank 0 sees it"):
        agreed.agreed_checkpoint(place, 1)
