"""A mistake on the command line is never put down to the file, nor one of the file to the command line."""

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


def told(tmp_path, *overrides: str, text: str = FILE, **options) -> list[str]:
    """The message, by lines, with the path of the file as FILE."""
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as info:
        load_config(path, overrides, **options)
    return str(info.value).replace(str(path), "FILE").splitlines()


@pytest.mark.parametrize(
    ("override", "begins"),
    [
        ("train.steps=abc", "train.steps must be a whole number, not 'abc' (text)."),
        ("train={steps: abc}", "train.steps must be a whole number"),
        ("strategy={fsdp: four}", "strategy.fsdp.size must be a whole number"),
        ("strategy.fsdp={size: 4, floor_bytes: x}", "strategy.fsdp.floor_bytes must be a whole number"),
        ("layouts={rules: {'a.*': [fsdpp]}}", "layouts.rules: 'a.*' names 'fsdpp'"),
        ("layouts.rules.a.*=[fsdpp]", "layouts.rules: 'a.*' names 'fsdpp'"),
        ("layouts.rule=3", "layouts.rule is not a key. Did you mean layouts.rules?"),
        ("run.simulate=4", "strategy: fsdp 4 x data 2, but run.simulate=4 gives 4 devices"),
        ("strategy.data=1", "strategy: fsdp 4 x data 1, but run.simulate=8 gives 8 devices"),
        ("train.accumulate=3", "train.global_batch=16 rows cannot be split evenly"),
        ("data.source=synthetic", "data.source=synthetic: it reads no files"),
        ("data={source: tokens}", "data.source=tokens: it reads files, and data.files is empty"),
        ("train.steps", "it must be key=value, such as train.steps=20."),
        ("train.steps.x=1", "train.steps is 20 and has no keys below it."),
        ("train={steps: 1", "not valid YAML"),
        ("train.\nsteps=3", "it must be key=value"),
    ],
)
def test_a_mistake_of_an_argument(override, begins, tmp_path):
    head, line, *others = told(tmp_path, override)
    argument = repr(override) if "\n" in override else override
    assert line.startswith(f"  {argument}: {begins}")
    assert all(other.startswith(f"  {argument}: ") for other in others)
    assert head.endswith(" on the command line:")
    assert "FILE" not in head


@pytest.mark.parametrize("override", ["", "  "])
def test_an_argument_of_nothing(override, tmp_path):
    expected = ["1 problem on the command line:", f"  {override!r}, an empty argument: it must be key=value, such as "]
    assert told(tmp_path, override) == [expected[0], f"{expected[1]}train.steps=20."]


@pytest.mark.parametrize("override", ["train.steps=30", "strategy.fsdp=4", "run.dir=x", "data.files=[b.txt]"])
def test_a_mistake_of_the_file_under_arguments_that_are_right(override, tmp_path):
    wrong = FILE.replace("floor_bytes: 1KiB", "floor_bytes: x")
    assert told(tmp_path, override, text=wrong) == [
        "1 problem in FILE:",
        "  line 3: strategy.fsdp.floor_bytes must be a whole number, not 'x' (text).",
    ]


def test_mistakes_of_both(tmp_path):
    found = told(tmp_path, "train.steps=abc", text=FILE.replace("rules", "rulez"))
    assert found == [
        "2 problems in FILE and on the command line:",
        "  line 6: layouts.rulez is not a key. Did you mean layouts.rules?",
        "  the command line: train.steps=abc: train.steps must be a whole number, not 'abc' (text).",
    ]


def test_one_of_two_keys_that_an_argument_has_made_wrong(tmp_path):
    """The message begins with the key of the file; the argument is what it names besides."""
    text = FILE.replace("[a.txt]", "[]").replace("source: text", "source: stdlib")
    lines = told(tmp_path, "data.source=synthetic", text=text)
    assert lines[1].startswith("  data.source=synthetic: data.packed=True:")


def test_from_python_the_place_has_its_own_name(tmp_path):
    assert told(tmp_path, "train.steps=abc", said="in changes")[0] == "1 problem in changes:"


def test_a_size_given_for_a_strategy_moves_no_path_of_the_file(tmp_path, monkeypatch):
    """`strategy.pipe=2` says nothing of the schedule, which starts from the folder of the file."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "my.yaml").write_text("run: {simulate: 2}\nstrategy: {pipe: {size: 1, schedule: mine.csv}}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(tmp_path / "my.yaml", ["strategy.pipe=2"])
    assert config.strategy["pipe"].schedule == "mine.csv"
    config = load_config(tmp_path / "my.yaml", ["strategy.pipe={size: 2, schedule: mine.csv}"])
    assert config.strategy["pipe"].schedule == str(tmp_path / "elsewhere" / "mine.csv")
