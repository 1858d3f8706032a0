"""The configs that come with the package: their names, what each shows, and a small one to begin with."""

from pathlib import Path

PRESETS = Path(__file__).parent

STARTER = """\
# A run of spmdkit, to be changed.      train it: spmdkit train my.yaml      prove it: spmdkit verify my.yaml
# Every key, with its default: spmdkit train --help-config.    Whole configs: spmdkit train --list

run:
  simulate: 8              # 8 CPU devices; take this line away to train on the GPUs or TPUs of the machine

strategy:                  # mesh axis: size. The sizes multiply to the number of devices; -1 is the rest
  data: -1                 # the model fits on one device: each holds all of it, and shares of the batch
  # fsdp: 4                # it does not: 4 devices hold one copy of parameters and optimizer between them
  # tensor: 2              # wide layers, inside a host; needs a model that splits its work, as transformer does
  # context: 2             # long rows: each device holds a part of the positions of every row
  # pipe: {size: 2, microbatches: 8}      # slow links between hosts: each device holds some of the layers

model:
  name: transformer        # or mlp, moe, or your own function: "my_model:make"
  layers: 2
  width: 64

data:
  source: stdlib           # the source code of Python's library; your files: text, tokens, jsonl, parquet, arrays
  # files: ["corpus/**/*.txt"]
  length: 128              # tokens in a row (here bytes)

optimizer:
  learning_rate: 3e-3
  schedule: {name: warmup_cosine}

train:
  steps: 100               # the same command with more steps goes on from the last checkpoint
  global_batch: 32         # rows of a step, over all devices

eval: {batches: 8}
"""
"""What `spmdkit init` prints."""


def preset_names() -> list[str]:
    """Returns the names of the configs that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_text(name: str) -> str:
    """Returns a preset as it stands in its file, comments and all.

    Args:
        name: One of `preset_names()`.
    """
    return (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """Returns what a preset shows, in one line: the second line of its file."""
    return preset_text(name).splitlines()[1].removeprefix("# ")


def describe_presets() -> str:
    """Returns the names of all presets with one line each, for `spmdkit train --list`."""
    names = preset_names()
    width = max(map(len, names))
    lines = [f"  {name:<{width}}  {preset_summary(name)}" for name in names]
    head = "Presets, each a whole config; `spmdkit init NAME > my.yaml` copies one, to be changed:"
    return "\n".join([head, "", *lines, "", "start here: spmdkit train quickstart"]) + "\n"
