from spmdkit.configs.errors import ConfigError


def test_one_line_for_each_problem():
    error = ConfigError(["line 3: a", "b"], "my.yaml")
    assert str(error) == "2 problems in my.yaml:\n  line 3: a\n  b"
    assert error.problems == ("line 3: a", "b")
    assert str(ConfigError(["a"])) == "1 problem in the config:\n  a"
