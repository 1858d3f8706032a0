"""The metrics log: only whole lines, no step twice after a resume, plain JSON."""

import errno
import json
import os
import resource
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.training.metrics import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_each_record_is_one_line_on_disk(path):
    with MetricsLog(path) as log:
        log.write({"step": 10, "loss": 2.5})
        assert path.read_text() == '{"step": 10, "loss": 2.5}\n'
        log.write({"step": 20, "loss": 2.25, "eval_loss": 2.4})
    assert read_metrics(path) == [{"step": 10, "loss": 2.5}, {"step": 20, "loss": 2.25, "eval_loss": 2.4}]


def test_scalars_become_plain_json(path):
    with MetricsLog(path) as log:
        log.write({"step": np.int32(1), "loss": jnp.float32(0.5), "grad_norm": np.inf, "eval_loss": float("nan")})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5, "grad_norm": None, "eval_loss": None}


def test_resume_drops_later_steps(path):
    with MetricsLog(path) as log:
        for step in (10, 20, 30):
            log.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # killed inside a write
    with MetricsLog(path, start_step=20) as log:
        log.write({"step": 25})
    assert [record["step"] for record in read_metrics(path)] == [10, 20, 25]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]
    log.close()  # again
    MetricsLog(path).close()
    assert path.read_text() == "", "a new run starts an empty log"


def test_rejects_invalid_lines(path):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    for text in ('{"step": 1}\n[3]\n{"step": 2}\n', '{"step": 1}\n[3]'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not a JSON object: '\[3\]'"):
            read_metrics(path)


@pytest.fixture
def small_file_limit(monkeypatch):
    """Limits files of this process to one page, as on a full disk; Python ignores SIGXFSZ."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a truncated .pyc would stay in the environment
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failed_write_leaves_no_partial_line(path, small_file_limit):
    with MetricsLog(path) as log:
        with pytest.raises(OSError, match=r"metrics\.jsonl") as raised:
            [log.write({"step": step, "loss": 0.123456789}) for step in range(1000)]
        assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
        text = path.read_text()
        assert text.endswith("}\n")
        assert 4096 - 60 < len(text) <= 4096


def test_failed_resume_leaves_the_log_unchanged(path, monkeypatch):
    with MetricsLog(path) as log:
        log.write({"step": 10})
        log.write({"step": 20})
    before = path.read_bytes()

    def full(*ignored):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        MetricsLog(path, start_step=10)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_says_that_it_removes_an_incomplete_line(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    MetricsLog(path, start_step=5).close()
    assert f"{path}: removing its last line, of which only the first 15 bytes were written" in capsys.readouterr().err
    assert path.read_text() == '{"step": 1}\n'
    MetricsLog(path, start_step=5).close()
    assert capsys.readouterr().err == ""
