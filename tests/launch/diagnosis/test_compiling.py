"""What `spmdkit doctor` says of compiling."""

import os

from spmdkit.configs.schema import RunConfig
from spmdkit.launch.diagnosis.compiling import compiling, told
from spmdkit.launch.diagnosis.finding import Finding


def test_where_programs_go_and_what_XLA_is_told(tmp_path):
    run = RunConfig(cache=str(tmp_path / "programs"), xla=("xla_cpu_enable_fast_math=false",))
    found = {finding.name: finding for finding in compiling(run, 8, {**os.environ, "XLA_FLAGS": ""})}
    assert found["programs"].found.startswith(f"{tmp_path}/programs/jax-")
    assert found["programs"].found.endswith("(run.cache), 0 programs, 0 B")
    assert found["XLA options"].found == "xla_cpu_enable_fast_math=false (run.xla)"
    assert "XLA_FLAGS" not in found
    assert not (tmp_path / "programs").exists()


def test_a_place_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    (found, *_) = compiling(RunConfig(cache=str(tmp_path / "file")), 8, {})
    assert found.level == "note"
    assert "every start compiles anew" in found.found


def test_flags_that_XLA_does_not_know():
    assert told("--xla_nope", "--xla_nope").level == "wrong"
    assert told("--xla_a=1", "") == Finding("XLA_FLAGS", "--xla_a=1", variable="XLA_FLAGS")
