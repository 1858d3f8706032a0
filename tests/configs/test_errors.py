from spmdkit.configs.errors import ConfigError, did_you_mean


def test_one_line_for_each_problem():
    error = ConfigError(["line 3: a", "b"], "my.yaml")
    assert str(error) == "2 problems in my.yaml:\n  line 3: a\n  b"
    assert error.problems == ("line 3: a", "b")
    assert str(ConfigError(["a"])) == "1 problem in the config:\n  a"


def test_near_names():
    assert did_you_mean("stps", ["steps", "seed"]) == " Did you mean steps?"
    assert did_you_mean("data_paralell", ["fsdp", "data_parallel"], count=2) == " Did you mean data_parallel?"
    assert did_you_mean("zzz", ["steps"]) == ""
