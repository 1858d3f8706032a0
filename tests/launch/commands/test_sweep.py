"""`spmdkit sweep` as it is typed: what is refused before anything starts."""

import pytest
from spmdkit.launch.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=fsdp"], "no key has several values"),
        (["a,b"], "no key has several values"),
        (["strategy=data,fsdp", "x"], "x: it must be key=value"),
        (["no.key=1,2"], "no.key"),
        (["strategy=data,fsdp", "run.seed=0,1,2", "--zip"], "strategy has 2 and run.seed has 3"),
        (["strategy=[data,fsdp],[fsdp]"], "strategy must be a mapping of mesh axes to sizes"),
        (["run.seed=-1,-2"], "run.seed must be at least 0, not -1"),
        (["run.seed=0,1", "--on", "local:2"], "--on 'local:2' is not a target"),
        (["run.seed=0,1", "--on", "mpi:2"], "--on mpi:2: the runs of a sweep are trained on this machine. Give loc"),
        (["run.seed=0,1", "--on", "locl:2x4"], "is no place to launch on. Did you mean local?"),
        (["run.seed=0,1", "--on", "local:2x3"], "2 processes with 3 devices each give 6"),
    ],
)
def test_mistakes_are_one_message(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "quickstart", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_one_process_of_a_job_sweeps_nothing(monkeypatch, capsys):
    monkeypatch.setenv("SPMDKIT_JOB_ADDRESSES", "127.0.0.1:1")
    monkeypatch.setenv("SPMDKIT_NUM_PROCESSES", "2")
    monkeypatch.setenv("SPMDKIT_PROCESS_ID", "0")
    assert main(["sweep", "quickstart", "run.seed=0,1"]) == 2
    assert "start it once, not in every process" in capsys.readouterr().err
