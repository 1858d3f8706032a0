from spmdkit.testing.faults import Fault
from spmdkit.testing.plans import KINDS, plan

OPTIONS = {"steps": 200, "processes": 2, "every": 4.0, "save_every": 5, "eval_every": 10}


def test_the_same_seed_gives_the_same_faults():
    assert plan(3, **OPTIONS) == plan(3, **OPTIONS) != plan(4, **OPTIONS)


def test_faults_are_a_few_steps_apart_and_every_kind_comes():
    found = plan(0, **OPTIONS)
    assert 200 / 4 * 0.5 < len(found) < 200 / 4 * 1.3
    assert {each.name for each in found} == set(KINDS)
    assert all(isinstance(fault, Fault) for each in found for fault in each.faults)
    assert {fault.rank for each in found for fault in each.faults} == {0, 1}


def test_faults_of_a_save_are_at_steps_that_are_saved():
    faults = [fault for each in plan(0, **OPTIONS) for fault in each.faults]
    assert all(fault.step % 5 == 0 for fault in faults if fault.phase.startswith("save"))
    assert all(fault.step % 10 == 0 for fault in faults if fault.phase == "evaluation")
    assert all(fault.step is None for fault in faults if fault.phase == "restore")


def test_the_only_checkpoint_is_not_damaged():
    for seed in range(20):
        damaged = [fault for each in plan(seed, **OPTIONS) for fault in each.faults if fault.kind == "damage"]
        assert damaged
        assert min(fault.step for fault in damaged) > 3 * OPTIONS["save_every"], "the second may still be written"
