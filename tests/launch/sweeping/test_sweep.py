"""What a sweep decides before and after its runs; tests/multiprocess/test_sweep.py trains."""

import pytest
from runs import write_config
from spmdkit.launch.sweeping.planning import Asked
from spmdkit.launch.sweeping.sweep import CannotRun, sweep, worst


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, None, 0], 0),
        ([3], 3),
        ([3, 75], 75),
        ([2, 3, 1], 1),
        ([2, 3], 3),
        ([2], 2),
        ([77], 77),
        ([77, 2], 2),
    ],
)
def test_of_several_exit_codes_what_may_mend_counts(codes, expected):
    assert worst(codes) == expected


def test_all_that_cannot_run_is_told_at_once_and_nothing_is_written(tmp_path):
    config = write_config(tmp_path)
    words = ["train.global_batch=15,17", "optimizer.name=sgd,adm"]
    with pytest.raises(CannotRun) as caught:
        sweep(Asked(str(config), words))
    text = str(caught.value)
    assert text.startswith("4 of 4 combinations cannot run, so nothing was trained:\nglobal_batch=15,name=sgd:\n  1 pr")
    assert text.count("train.global_batch=15 rows cannot be split evenly") == 2
    assert text.count("'adm'") == 2
    assert text.endswith("\nCorrect them.")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_reason_of_several_is_told_once(tmp_path):
    config = write_config(tmp_path)
    with pytest.raises(CannotRun) as caught:
        sweep(Asked(str(config), ["train.stps=3", "run.seed=0,1"], skip_invalid=True))
    assert str(caught.value).splitlines() == [
        "2 of 2 combinations cannot run, so nothing was trained:",
        "seed=0, seed=1:",
        "  1 problem on the command line:",
        "    override train.stps=3: train.stps is not a key. Did you mean train.steps?",
        "Correct them.",
    ]
