"""Each problem is reported with the line or the argument that causes it."""

import pytest
from spmdkit.configs import ConfigError, load_config

FILE = """\
run: {simulate: 8}
strategy:
  fsdp: {size: 4, floor_bytes: 1KiB}
  data: 2
layouts:
  rules: {'a.*': [fsdp]}
data:
  source: text
  files: [a.txt]
  packed: true
train:
  steps: 20
  global_batch: 16
"""


def error_lines(tmp_path, *overrides: str, text: str = FILE, **options) -> list[str]:
    """Returns the lines of the message, with the path of the file as FILE."""
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as info:
        load_config(path, overrides, **options)
    return str(info.value).replace(str(path), "FILE").splitlines()


@pytest.mark.parametrize(
    ("override", "begins"),
    [
        ("train.steps=abc", "train.steps must be an integer, got 'abc' (string)."),
        ("train={steps: abc}", "train.steps must be an integer"),
        ("strategy={fsdp: four}", "strategy.fsdp.size must be an integer"),
        ("strategy.fsdp={size: 4, floor_bytes: x}", "strategy.fsdp.floor_bytes must be an integer"),
        ("layouts={rules: {'a.*': [fsdpp]}}", "layouts.rules: 'a.*' names 'fsdpp'"),
        ("layouts.rules.a.*=[fsdpp]", "layouts.rules: 'a.*' names 'fsdpp'"),
        ("strategy={data:2}", "strategy.data:2 is not a valid key. YAML needs a space after a colon: data: 2."),
        ("layouts.rule=3", "layouts.rule is not a valid key. Did you mean layouts.rules?"),
        ("run.simulate=4", "strategy: fsdp 4 x data 2, but run.simulate=4 gives 4 devices"),
        ("strategy.data=1", "strategy: fsdp 4 x data 1, but run.simulate=8 gives 8 devices"),
        ("train.accumulate=3", "train.global_batch=16 rows cannot be split evenly"),
        ("data.source=synthetic", "data.source=synthetic does not read files"),
        ("data={source: tokens}", "data.source=tokens: data.files is empty"),
        ("train.steps", "it must be key=value, such as train.steps=20."),
        ("train.steps.x=1", "train.steps is 20, which cannot have keys below it."),
        ("train={steps: 1", "invalid YAML"),
        ("train.\nsteps=3", "it must be key=value"),
    ],
)
def test_names_the_argument_of_a_problem(override, begins, tmp_path):
    head, line, *others = error_lines(tmp_path, override)
    argument = repr(override) if "\n" in override else override
    assert line.startswith(f"  {argument}: {begins}")
    assert all(other.startswith(f"  {argument}: ") for other in others)
    assert head.endswith(" on the command line:")
    assert "FILE" not in head


@pytest.mark.parametrize("override", ["", "  "])
def test_rejects_an_empty_argument(override, tmp_path):
    expected = ["1 problem on the command line:", f"  {override!r}, an empty argument: it must be key=value, such as "]
    assert error_lines(tmp_path, override) == [expected[0], f"{expected[1]}train.steps=20."]


@pytest.mark.parametrize("override", ["train.steps=30", "strategy.fsdp=4", "run.dir=x", "data.files=[b.txt]"])
def test_names_the_line_if_the_arguments_are_valid(override, tmp_path):
    wrong = FILE.replace("floor_bytes: 1KiB", "floor_bytes: x")
    assert error_lines(tmp_path, override, text=wrong) == [
        "1 problem in FILE:",
        "  line 3: strategy.fsdp.floor_bytes must be an integer, got 'x' (string).",
    ]


def test_names_lines_and_arguments(tmp_path):
    found = error_lines(tmp_path, "train.steps=abc", text=FILE.replace("rules", "rulez"))
    assert found == [
        "2 problems in FILE and on the command line:",
        "  line 6: layouts.rulez is not a valid key. Did you mean layouts.rules?",
        "  the command line: train.steps=abc: train.steps must be an integer, got 'abc' (string).",
    ]


def test_names_the_argument_that_conflicts_with_the_file(tmp_path):
    text = FILE.replace("[a.txt]", "[]").replace("source: text", "source: stdlib")
    lines = error_lines(tmp_path, "data.source=synthetic", text=text)
    assert lines[1].startswith("  data.source=synthetic: data.packed=True:")


def test_setting_a_size_keeps_paths_of_the_file(tmp_path, monkeypatch):
    """`strategy.pipe=2` does not set the schedule, which starts from the directory of the file."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "my.yaml").write_text("run: {simulate: 2}\nstrategy: {pipe: {size: 1, schedule: mine.csv}}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(tmp_path / "my.yaml", ["strategy.pipe=2"])
    assert config.strategy["pipe"].schedule == "mine.csv"
    config = load_config(tmp_path / "my.yaml", ["strategy.pipe={size: 2, schedule: mine.csv}"])
    assert config.strategy["pipe"].schedule == str(tmp_path / "elsewhere" / "mine.csv")
