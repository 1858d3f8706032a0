"""Where programs are kept; and that a second start reads them, with the same losses, whatever became of them."""

import json
import re

import jax
import pytest
from runs import losses, trained, write_config
from spmdkit.configs.schema import Config, RunConfig
from spmdkit.launch.compiling import cache
from spmdkit.launch.compiling.cache import open_cache, place_of, processor_hash, users_caches
from spmdkit.mesh.compat import keep_programs


@pytest.fixture
def untold(monkeypatch):
    """As in a process whose JAX was told nothing."""
    monkeypatch.setattr(cache, "REPLACED", {})
    told = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", told)
    keep_programs(None)  # JAX opens that folder again


def test_a_place_for_each_version_of_jax_and_each_processor(untold, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = place_of("", on_cpu=True)
    assert place.folder == f"{tmp_path}/spmdkit/programs/jax-{jax.__version__}-cpu-{processor_hash()}"
    assert place_of("", on_cpu=False).folder == f"{tmp_path}/spmdkit/programs/jax-{jax.__version__}"
    assert place_of("/some/where", on_cpu=False).folder == f"/some/where/jax-{jax.__version__}"
    assert str(place_of("none", on_cpu=True)) == "not kept (run.cache: none)"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(users_caches()) == "/home/somebody/.cache"


def test_what_jax_was_told_stays():
    place = place_of("", on_cpu=True)
    assert place.by_jax
    assert place.folder == jax.config.jax_compilation_cache_dir


@pytest.mark.parametrize("what", ["file", "none"])
def test_a_folder_that_is_none_ends_nothing(what, untold, tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    given = str(tmp_path / "file") if what == "file" else "none"
    place = open_cache(Config(run=RunConfig(cache=given)), 8, said.append)
    assert jax.config.jax_compilation_cache_dir is None
    if what == "none":
        assert not said
        assert str(place) == "not kept (run.cache: none)"
    else:
        assert len(said) == 1
        assert re.match(r"warning: compiled programs are not kept in \S+/file/jax-\S+: Not a directory", said[0])
        assert said[0].endswith("Set run.cache, or run.cache: none.")
    assert float(jax.jit(lambda x: x + len(what))(1.0)) == 5.0


@pytest.mark.parametrize("told", ["", "told"])
def test_a_second_run_in_a_process_takes_the_folder_of_the_first_for_nobodys(told, untold, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    users = str(tmp_path / told) if told else ""
    jax.config.update("jax_compilation_cache_dir", users or None)
    for first in ("", str(tmp_path / "first"), "none"):
        open_cache(Config(run=RunConfig(cache=first)), 8, print)
        place = open_cache(Config(), 8, print)
        assert place.by_jax == bool(told)
        assert place.folder == users or place.folder.startswith(f"{tmp_path}/caches/spmdkit/programs/")
        assert jax.config.jax_compilation_cache_dir == place.folder


def test_a_host_with_GPUs_whose_JAX_is_told_to_use_the_CPU(monkeypatch):
    monkeypatch.setattr(cache, "has_accelerators", lambda: True)
    before = jax.config.jax_platforms
    try:
        for told, expected in (("cpu", True), ("cuda", False), (None, False)):
            jax.config.update("jax_platforms", told)
            assert cache.on_cpu(0) is expected
    finally:
        jax.config.update("jax_platforms", before)


def start(config, folder, *arguments):
    """Trains anew in a process whose JAX was told nothing of a cache; its output, losses and compilation.json."""
    told = {"JAX_COMPILATION_CACHE_DIR": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ended = trained("train", config, "--fresh", *arguments, XDG_CACHE_HOME=str(folder), **told)
    run = config.parent / "run"
    return ended.stdout + ended.stderr, losses(run), json.loads((run / "compilation.json").read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_start_reads_what_the_first_has_compiled(tmp_path):
    config = write_config(tmp_path, train={"steps": 4, "global_batch": 16})
    _, first, cold = start(config, tmp_path)
    (folder,) = (tmp_path / "spmdkit" / "programs").glob("jax-*")
    kept = sorted(folder.glob("*.program"))
    assert kept
    assert cold["read"] == 0
    assert cold["programs"] >= len(kept)
    kept[0].write_bytes(kept[0].read_bytes()[:-7])
    output, second, warm = start(config, tmp_path)
    assert second == first
    assert warm["read"] == len(kept) - 1
    assert f"{kept[0]} is damaged; the program is compiled anew" in output
    said = re.search(r"Compiled \d+ programs in [\d.]+ s, \d+ of them read from (\S+)\.\n", output)
    assert said
    assert said[1] == str(folder)
