"""The compilation cache: its directory, the programs that processes agree to read, and a second start."""

import json
import re
import zlib
from math import prod
from pathlib import Path

import jax
import pytest
from spmdkit.configs.schema import RunConfig
from spmdkit.mesh.compat import keep_programs
from spmdkit.mesh.errors import UserError
from spmdkit.models import TransformerConfig, transformer
from spmdkit.parallel import lay_out
from spmdkit.runtime import compilation
from spmdkit.runtime.compilation import (
    DOUBLE_BUFFERING,
    LATENCY_HIDING,
    MEMORY_LIMIT,
    OVERLAP_LIMIT,
    cache_directory,
    default_options,
    open_cache,
    xla_options,
)
from support.runs import losses, trained, write_config


@pytest.fixture
def unconfigured(monkeypatch):
    """A process whose JAX has no cache configured."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    keep_programs(None)  # JAX opens that directory again


def test_directory_per_jax_version_and_processor(unconfigured, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"jax-{jax.__version__}"
    common = f"{tmp_path}/spmdkit/programs/{name}"
    assert cache_directory("", on_cpu=True).path == f"{common}-cpu-{compilation.processor_hash()}"
    assert cache_directory("", on_cpu=False).path == common
    assert cache_directory("/some/where", on_cpu=False).path == f"/some/where/{name}"
    assert str(cache_directory("none", on_cpu=True)) == "not kept (run.cache: none)"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(compilation.users_caches()) == "/home/somebody/.cache"


def test_keeps_directory_of_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert cache_directory("", on_cpu=True) == ("/elsewhere", "JAX_COMPILATION_CACHE_DIR")
    assert cache_directory("/mine", on_cpu=True).path.startswith("/mine/")


@pytest.mark.parametrize(("cache", "variable", "seconds"), [("", "", 1.0), ("mine", "", 0.0), ("mine", "1", 1.0)])
def test_stores_small_programs_outside_the_directory_of_the_environment(
    cache, variable, seconds, unconfigured, monkeypatch, tmp_path
):
    name = "jax_persistent_cache_min_compile_time_secs"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "given"))
    monkeypatch.delenv(name.upper(), raising=False)
    if variable:
        monkeypatch.setenv(name.upper(), variable)
    before = getattr(jax.config, name)
    jax.config.update(name, 1.0)
    try:
        open_cache(RunConfig(cache=cache and str(tmp_path / cache), simulate=8), 1.0)
        assert getattr(jax.config, name) == seconds
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("kind", ["file", "none"])
def test_unusable_directory_only_warns(kind, unconfigured, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = str(tmp_path / "file") if kind == "file" else "none"
    directory = open_cache(RunConfig(cache=given, simulate=8), 1.0)
    lines = capsys.readouterr().err.splitlines()
    assert jax.config.jax_compilation_cache_dir is None
    if kind == "none":
        assert not lines
        assert str(directory) == "not kept (run.cache: none)"
    else:
        assert len(lines) == 1
        assert re.match(r"warning: compiled programs are not kept in \S+/file/jax-\S+: Not a directory", lines[0])
        assert lines[0].endswith("Set run.cache, or run.cache: none.")
    assert float(jax.jit(lambda x: x + len(kind))(1.0)) == 5.0


def test_second_run_of_a_process_ignores_directory_of_the_first(unconfigured, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for first in (str(tmp_path / "first"), "none"):
        open_cache(RunConfig(cache=first, simulate=8), 1.0)
        path = open_cache(RunConfig(cache="", simulate=8), 1.0).path
        assert path.startswith(f"{tmp_path}/caches/spmdkit/programs/")
        assert jax.config.jax_compilation_cache_dir == path
        assert Path(path).stat().st_mode & 0o777 == 0o700, "programs run unchecked"


def test_jax_platforms_selects_cpu_on_a_host_with_gpus(monkeypatch):
    monkeypatch.setattr(compilation, "has_accelerators", lambda: True)
    before = jax.config.jax_platforms
    try:
        for platforms, expected in (("cpu", True), ("cuda", False), (None, False)):
            jax.config.update("jax_platforms", platforms)
            assert compilation.runs_on_cpu(0) is expected
    finally:
        jax.config.update("jax_platforms", before)


def test_agreed_programs_reads_agreed_keys_only(tmp_path):
    cache = compilation.AgreedPrograms(tmp_path, frozenset({"a", "b", "c"}))
    for key in ("a", "b", "other"):
        cache.put(key, zlib.compress(key.encode()))
    assert zlib.decompress(cache.get("a")) == b"a"
    assert cache.get("other") is None
    corrupt = tmp_path / "b-cache"
    corrupt.write_bytes(corrupt.read_bytes()[:-2])
    for key in ("b", "c"):
        with pytest.raises(compilation.ProgramLost, match=f"{key}-cache was there when this run started"):
            cache.get(key)
    assert not corrupt.exists(), "the next start compiles"


def start(config, folder, *arguments):
    """Trains in a new process without a configured cache; returns its output, losses and compilation.json."""
    environment = {"JAX_COMPILATION_CACHE_DIR": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ended = trained("train", config, "--fresh", *arguments, XDG_CACHE_HOME=str(folder), **environment)
    run = config.parent / "run"
    return ended.stdout + ended.stderr, losses(run), json.loads((run / "compilation.json").read_text())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_second_start_reads_programs_of_the_first(tmp_path):
    config = write_config(tmp_path, train={"steps": 4, "global_batch": 16})
    _, first, cold = start(config, tmp_path)
    (folder,) = (tmp_path / "spmdkit" / "programs").glob("jax-*")
    kept = sorted(folder.glob("*-cache"))
    assert kept
    assert cold["read"] == 0
    assert cold["programs"] >= len(kept)
    kept[0].write_bytes(kept[0].read_bytes()[:-7])
    output, second, warm = start(config, tmp_path)
    assert second == first
    assert warm["read"] == len(kept) - 1
    line = re.search(r"Compiled \d+ programs in [\d.]+ s, \d+ of them read from (\S+)\.\n", output)
    assert line
    assert line[1] == str(folder)


CASES = {  # directories, problems and keys of both processes: problem and agreed keys
    "keys that both see": (("one", "one"), ("", ""), ("ab", "bc"), ["", ["b"]]),
    "key missing on process 0": (("one", "one"), ("", ""), ("b", "abc"), ["", ["b"]]),
    "empty directory": (("one", "one"), ("", ""), ("", ""), ["", []]),
    "no program of process 0": (("one", "two"), ("", ""), ("a", "b"), [compilation.NOT_SHARED, None]),
    "directory and bucket": (("one", "gs://x"), ("", ""), ("a", ""), [compilation.NOT_SHARED, None]),
    "same bucket": (("gs://x", "gs://x"), ("", ""), ("", ""), ["", None]),
    "two buckets": (("gs://x", "gs://y"), ("", ""), ("", ""), [compilation.NOT_SHARED, None]),
    "same problem": (("one", "one"), ("full", "full"), ("a", "a"), ["full", None]),
}


class Sent(Exception):
    """What a process sends to the others."""


def agree(monkeypatch, rank, paths, problems, keys, answers=None):
    """Calls `_agree` as one of two processes; raises `Sent` if there are no answers yet."""

    def exchange(name, text, *, seconds):
        if answers is None:
            raise Sent(text)
        return answers

    listed = sorted(keys[0]) if paths[0] in ("one", "two") and not problems[0] else []
    monkeypatch.setattr(compilation, "_keys", lambda directory: list(keys[rank]))
    monkeypatch.setattr(compilation, "broadcast_text", lambda name, text, *, seconds: json.dumps(listed))
    monkeypatch.setattr(compilation, "exchange", exchange)
    return compilation._agree(compilation.CacheDirectory(paths[rank], ""), problems[rank], 1.0)


@pytest.mark.parametrize("name", CASES)
def test_processes_agree_on_the_same_programs(name, monkeypatch):
    *case, expected = CASES[name]
    answers = []
    for rank in (0, 1):
        with pytest.raises(Sent) as sent:
            agree(monkeypatch, rank, *case)
        answers.append(str(sent.value))
    for rank in (0, 1):
        problem, keys = agree(monkeypatch, rank, *case, answers=answers)
        assert [problem, keys if keys is None else sorted(keys)] == expected


MODEL = transformer(TransformerConfig(vocabulary=8, length=8, layers=2, width=8, heads=2))


def laid_out(strategy, platform="cuda"):
    devices = [f"{platform}:{number}" for number in range(prod(strategy.values()))]
    return lay_out(MODEL, strategy, devices=devices)


def test_cpu_has_no_default_options():
    found = xla_options("default", laid_out({"data": 2}, "cpu"), flags="")
    assert found == compilation.XlaOptions({}, {})
    assert str(found) == "no options of XLA"


def test_double_buffering_is_off_if_gradients_are_summed_in_the_loop():
    always = {LATENCY_HIDING: True, MEMORY_LIMIT: 1000}
    assert default_options(laid_out({"data": 2})) == always
    assert default_options(laid_out({"data": 2, "tensor": 2}, "gpu")) == always
    assert default_options(laid_out({"pipe": 2})) == always, "the schedule is a loop too"
    assert default_options(laid_out({"tensor": 2})) == always | {DOUBLE_BUFFERING: True}


def test_xla_flags_override_defaults():
    plan = laid_out({"tensor": 2})
    found = xla_options("default", plan, flags=f"--{LATENCY_HIDING}=false")
    assert found.used == {MEMORY_LIMIT: 1000, DOUBLE_BUFFERING: True}
    assert found.left_out == {LATENCY_HIDING: "XLA_FLAGS names it"}
    assert xla_options("none", plan, flags="").used == {}


def test_xla_accepts_default_options():
    options = {LATENCY_HIDING: True, MEMORY_LIMIT: 1000, DOUBLE_BUFFERING: True, OVERLAP_LIMIT: 2}
    jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options=options)


def test_parses_values_and_omits_other_platforms():
    given = ("--xla_cpu_enable_fast_math=false", "xla_gpu_autotune_level=0", "xla_backend_optimization_level=1")
    jax.devices()
    assert xla_options(given, laid_out({"data": 2}, "cpu"), flags="").used == {
        "xla_cpu_enable_fast_math": False,
        "xla_backend_optimization_level": 1,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xla_nope=1", r"run.xla: XLA of jaxlib [\d.]+ does not know xla_nope; remove it, or find its new name"),
        ("xla_cpu_enable_fast_math=often", "run.xla: xla_cpu_enable_fast_math: .*'often' is not a valid bool value"),
    ],
)
def test_rejects_unknown_xla_options(given, message):
    jax.devices()
    with pytest.raises(UserError, match=message):
        xla_options((given, "xla_cpu_enable_fast_min_max=true"), laid_out({"data": 2}, "cpu"), flags="")
