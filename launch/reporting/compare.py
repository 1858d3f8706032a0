"""Several runs side by side: names that tell them apart, and the keys in which their configs differ."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...training.report.comparison import MISSING, ComparedRun
from .figures import final_figures
from .record import RunRecord

IDENTITY = ("run.dir",)
"""Keys that differ because the runs are two."""


def compared(records: Sequence[RunRecord]) -> list[ComparedRun]:
    """Prepares runs for a page that compares them.

    Args:
        records: Of the runs, each of another folder.
    """
    names = short_names([record.folder for record in records])
    return [
        ComparedRun(name, record.metrics, final_figures(record), record.goodput)
        for name, record in zip(names, records, strict=True)
    ]


def short_names(folders: Sequence[Path]) -> list[str]:
    """Names folders by what follows the folder that all of them are in; as they are where that is the root.

    Args:
        folders: Absolute, each another one.
    """
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    if common == Path(common.anchor):  # without it they would read as relative
        return [folder.as_posix() for folder in folders]
    return [folder.relative_to(common).as_posix() for folder in folders]


def config_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Finds the keys whose values differ.

    Args:
        configs: Plain data: sections of keys.

    Returns:
        Key, as key=value arguments name it -> its value in each config, `MISSING` where it has none. A list is one
        value; `run.dir` is left out.
    """
    leaves = [dict(_leaves(config)) for config in configs]
    keys = dict.fromkeys(key for each in leaves for key in each)
    values = {key: [each.get(key, MISSING) for each in leaves] for key in keys if key not in IDENTITY}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        key = f"{above}{name}"
        if isinstance(each, Mapping) and each:
            yield from _leaves(each, f"{key}.")
        else:
            yield key, each
