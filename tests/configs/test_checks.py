from dataclasses import replace

import pytest
from spmdkit.configs.checks import check_devices, elastic_problems, layout_problems, section_problems, size_problems
from spmdkit.configs.config_errors import ConfigError
from spmdkit.configs.schema import CheckpointConfig, Config, LayoutsConfig, TrainConfig
from spmdkit.parallel.sharding.strategies import option_types


def config(global_batch: int = 64, accumulate: int = 1, **sizes: int) -> Config:
    strategy = {axis: option_types()[axis](size=size) for axis, size in sizes.items()}
    return Config(strategy=strategy, train=TrainConfig(global_batch=global_batch, accumulate=accumulate))


def check(given: Config, num_devices: int) -> dict[str, int]:
    return check_devices(given.strategy, given.train, given.layouts.rules, num_devices)


def problem_of(given: Config, num_devices: int) -> str:
    with pytest.raises(ConfigError) as info:
        check(given, num_devices)
    (problem,) = info.value.problems
    return problem


@pytest.mark.parametrize(
    ("sizes", "num_devices", "resolved"),
    [
        ({"fsdp": 4, "data": 2}, 8, {"fsdp": 4, "data": 2}),
        ({"fsdp": -1, "data": 2}, 8, {"fsdp": 4, "data": 2}),
        ({"data": -1}, 1, {"data": 1}),
        ({"fsdp": 8, "data": -1}, 8, {"fsdp": 8, "data": 1}),
        ({}, 1, {}),
    ],
)
def test_resolves_sizes(sizes, num_devices, resolved):
    assert check(config(**sizes), num_devices) == resolved


@pytest.mark.parametrize(
    ("sizes", "num_devices", "problem"),
    [
        ({"fsdp": 4, "data": 2}, 4,
         "strategy: fsdp 4 x data 2, but there are 4 devices: 8 != 4. Set strategy.fsdp=2, strategy.data=1 or "
         "run.simulate=8 to simulate that many on the CPU."),
        ({"data": 8}, 1,
         "strategy: data 8, but there is 1 device: 8 != 1. Set strategy.data=1 or run.simulate=8 to simulate that many "
         "on the CPU."),
        ({"fsdp": 4}, 8, "strategy: fsdp 4, but there are 8 devices: 4 != 8. Set strategy.data=2 or strategy.fsdp=8."),
        ({"fsdp": 3, "data": -1}, 8,
         "strategy: fsdp 3 x data -1, but there are 8 devices: 8 % 3 = 2. Set strategy.fsdp=2."),
        ({"fsdp": 3, "data": 5}, 8,
         "strategy: fsdp 3 x data 5, but there are 8 devices: 15 != 8. Set sizes whose product is 8 or "
         "run.simulate=15 to simulate that many on the CPU."),
        ({"fsdp": 3, "data": 2}, 8,
         "strategy: fsdp 3 x data 2, but there are 8 devices: 6 != 8. Set strategy.fsdp=4."),
        ({"fsdp": 2, "data": -1}, 1,
         "strategy: fsdp 2 x data -1, but there is 1 device: 1 % 2 = 1. Set strategy.fsdp=1 or run.simulate=2 to "
         "simulate that many on the CPU."),
        ({}, 8, "strategy: no axes, but there are 8 devices: 1 != 8. Set strategy.data=8."),
        ({"fsdp": -1, "data": -1}, 8,
         "strategy: fsdp=-1 and data=-1: only one axis can be -1. Set the sizes of the others."),
    ],
)  # fmt: skip
def test_rejects_sizes_with_the_wrong_product(sizes, num_devices, problem):
    assert problem_of(config(**sizes), num_devices) == problem


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (config(30, data=2, fsdp=4),
         "train.global_batch=30 rows cannot be split evenly: strategy.data 2 x strategy.fsdp 4 x train.accumulate 1 "
         "= 8, and 30 % 8 = 6. Set train.global_batch=24 or train.global_batch=32."),
        (config(24, accumulate=2, fsdp=8),
         "train.global_batch=24 rows cannot be split evenly: strategy.fsdp 8 x train.accumulate 2 = 16, "
         "and 24 % 16 = 8. Set train.global_batch=16, train.global_batch=32 or train.accumulate=1."),
        (config(4, data=-1),
         "train.global_batch=4 rows cannot be split evenly: strategy.data 8 x train.accumulate 1 = 8, "
         "and 4 % 8 = 4. Set train.global_batch=8."),
    ],
)  # fmt: skip
def test_rejects_batches_that_cannot_be_split(given, problem):
    assert problem_of(given, 8) == problem


def test_splits_rows_over_experts_unless_rules_leave_them_to_xla():
    given = config(6, data=2, expert=4)
    assert problem_of(given, 8) == (
        "train.global_batch=6 rows cannot be split evenly: strategy.data 2 x strategy.expert 4 x train.accumulate 1 "
        "= 8, and 6 % 8 = 6. Set train.global_batch=8."
    )
    rules = LayoutsConfig(rules={"experts/.*": (None, ("expert",), None)})
    assert check(replace(given, layouts=rules), 8) == {"data": 2, "expert": 4}


@pytest.mark.parametrize(
    ("microbatches", "global_batch", "problem"),
    [
        (8, 24,
         "train.global_batch=24 rows cannot be split evenly: strategy.data 2 x strategy.pipe.microbatches 8 x "
         "train.accumulate 1 = 16, and 24 % 16 = 8. Set train.global_batch=16 or train.global_batch=32."),
        (0, 20,
         "train.global_batch=20 rows cannot be split evenly: strategy.data 2 x strategy.pipe.microbatches 8 x "
         "train.accumulate 1 = 16, and 20 % 16 = 4. Set train.global_batch=16 or train.global_batch=32."),
        (3, 24,
         "strategy.pipe.microbatches=3 is fewer than strategy.pipe.size=4: 3 < 4, so not all stages could ever work "
         "at once. Set strategy.pipe.microbatches to 4 or more, or strategy.pipe.size to 3 or less."),
        (-1, 31,
         "strategy.pipe.microbatches=-1 is fewer than strategy.pipe.size=4: -1 < 4, so not all stages could ever work "
         "at once. Set strategy.pipe.microbatches to 4 or more."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stages", [4, -1])
def test_rejects_invalid_microbatches(stages, microbatches, global_batch, problem):
    strategy = {
        "pipe": option_types()["pipe"](size=stages, microbatches=microbatches),
        "data": option_types()["data"](size=2),
    }
    given = replace(config(global_batch), strategy=strategy)
    assert problem_of(given, 8) == problem


def test_skips_checks_of_unknown_sizes():
    for size, microbatches in ((-1, 0), (1, 3)):
        strategy = {"pipe": option_types()["pipe"](size=size, microbatches=microbatches)}
        assert size_problems(strategy, config(7).train, {}, None) == []


def test_accepts_each_half_of_two_keys_that_exclude_each_other():
    precision, fresh = Config().precision, CheckpointConfig(start_from="a", start_fresh=("head/.*",))
    for not_finite, compute in (("roll_back", "bfloat16"), ("skip", "float16")):
        train = TrainConfig(not_finite=not_finite)
        assert section_problems(train, fresh, replace(precision, compute=compute)) == []
    plain, packed = ({"data": option_types()["data"](size=2, compress=kind)} for kind in ("none", "int8"))
    assert elastic_problems(packed, ()) == elastic_problems(plain, ("data",)) == []
    assert len(elastic_problems(packed, ("data",))) == 1


def test_rejects_invalid_layout_rules():
    problems = layout_problems({"a(": ["fsdp"], "b": ["fsdpp", None, ("data", "tensr")], "c": [None, "tensor"]})
    which = "is not a mesh axis. Mesh axes: pipe, data, fsdp, expert, context, tensor."
    assert [problem.message for problem in problems] == [
        "layouts.rules: 'a(' is not a valid regular expression: missing ), unterminated subpattern at position 1.",
        f"layouts.rules: 'b' names 'fsdpp', which {which} Did you mean fsdp?",
        f"layouts.rules: 'b' names 'tensr', which {which} Did you mean tensor?",
    ]


def test_rejects_steps_after_the_last_synchronization():
    rounds = {"data": option_types()["data"](size=2, local_steps=8)}
    whole, broken = (Config(strategy=rounds, train=TrainConfig(steps=steps)) for steps in (24, 20))
    assert check(whole, 2) == {"data": 2}
    alone = {"data": option_types()["data"](size=1, local_steps=8)}
    assert check(replace(broken, strategy=alone), 1) == {"data": 1}, "nothing is synchronized"
    assert problem_of(broken, 2) == (
        "train.steps=20 is not a multiple of strategy.data.local_steps=8: 20 % 8 = 4, and the steps after the last "
        "synchronization would be lost. Set train.steps=16 or train.steps=24."
    )
