"""The embedded data set is a fixed set of files, there on every machine with Python."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import spmdkit.data.sources.texts.stdlib as stdlib
from spmdkit.data import DataConfig, open_splits
from spmdkit.data.sources.texts.stdlib import stdlib_files

SKIPPED = ["test/a.py", "json/tests/a.py", "site-packages/a.py", "idlelib/a.py", "config-3.11/a.py", "encodings/a.py"]
SKIPPED += ["_sysconfigdata_x86.py", "sitecustomize.py", "__pycache__/a.py", "readme.txt", "lib.so"]


def test_which_files_belong_to_it(tmp_path):
    kept = ["abc.py", "json/__init__.py", "json/tool.py", "zipfile.py"]
    for name in [*SKIPPED, *kept]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert [file.name for file in stdlib_files(tmp_path)] == kept


def test_the_files_of_this_python():
    names = [file.name for file in stdlib_files(Path(sysconfig.get_paths()["stdlib"]))]
    assert 300 < len(names) < 600
    assert names == sorted(names)
    assert {"ast.py", "asyncio/tasks.py", "json/decoder.py", "typing.py"} <= set(names)


def test_it_opens_as_real_text():
    splits = open_splits(DataConfig(length=64))
    assert splits.evaluation is not None
    tokens = 64 * (len(splits.train) + len(splits.evaluation))
    assert 6_000_000 < tokens < 12_000_000
    assert len(splits.evaluation) / len(splits.train) == pytest.approx(0.06, abs=0.04)
    text = b"".join(splits.train[i]["inputs"].astype(np.uint8).tobytes() for i in range(2000))
    assert text.count(b"def ") >= 100
    assert splits.description.startswith("stdlib: source of Python 3.")


def test_a_python_without_sources_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"holds 0 bytes of Python source.*set data\.source: text and data\.files"):
        open_splits(DataConfig())
