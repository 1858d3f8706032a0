"""Targets: texts, files of cards, names of devices, and the errors of each."""

import jax
import numpy as np
import pytest
import yaml
from spmdkit.mesh import targets
from spmdkit.mesh.targets import CARDS, compiling_for, parse_target

from spmdkit import DeviceMesh, UserError, list_devices


def test_numbers_devices_host_by_host():
    names = list_devices(target="h100:2x8")
    assert len(names) == 16
    assert (names[0], names[15]) == ("gpu:0@h100:2x8", "gpu:15@h100:2x8")


def test_mesh_shows_target_once():
    mesh = DeviceMesh((2, 8), ("data", "fsdp"), list_devices(target="h100:2x8"))
    heading, *rows = str(mesh).splitlines()
    assert heading == "data=2, fsdp=8: 16 devices, h100:2x8"
    assert "@" not in "".join(rows)
    assert mesh.target.card.memory_bytes == 84_942_979_072
    assert mesh.axes_across_processes == ("data",)


def test_only_programs_for_targets_stay_out_of_the_cache():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    with compiling_for(parse_target("h100:2x8")):
        assert jax.config.jax_persistent_cache_min_compile_time_secs == float("inf")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before


def test_mesh_of_this_machine_has_no_target():
    assert DeviceMesh.simulated(8, data=8).target is None


def test_one_number_is_the_gpus_of_one_host():
    target = parse_target("h100:8")
    assert (target.text, target.hosts, target.gpus) == ("h100:1x8", 1, 8)
    assert list_devices(target="h100:8") == list_devices(target="h100:1x8")
    assert parse_target("gb200:72").text == "gb200:1x72"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "'h100' is invalid: expected CARD:HOSTSxGPUS, such as h100:16x8"),
        ("h100:16", r"so 16 is more than one host. For 16 GPUs, write h100:2x8; for 16 hosts, h100:16x8\."),
        ("h100:0", "1 x 0 = 0 devices"),
        ("v5p:8", r"Google TPU v5p needs 3 numbers, got 1, such as v5p:4x4x4"),
        ("h100:2x-8", "'h100:2x-8' is invalid"),
        ("h10:2x8", r"Unknown target 'h10'; known: a100-40, .*Did you mean 'h100'\?"),
        ("h100:0x8", "0 x 8 = 0 devices; allowed: 1 .. 65,536"),
        ("h100:9000x8", "9000 x 8 = 72,000 devices"),
        ("h100:2x2x2", r"NVIDIA H100 80GB HBM3 needs 2 numbers, got 3, such as h100:16x8"),
        ("v5p:8x8", r"Google TPU v5p needs 3 numbers, got 2, such as v5p:4x4x4"),
        ("v5e:0x4", "0 x 4 = 0 devices"),
        ("h100:2x16", r"8 of NVIDIA H100 80GB HBM3 \(gpus_per_host\), got 16. For 32 devices, write h100:4x8"),
    ],
)
def test_rejects_invalid_targets(text, message):
    with pytest.raises(UserError, match=message):
        list_devices(target=text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cores": None}, "cores: Input should be a valid integer, got None"),
        ({"cores": 1.5}, "cores: Input should be a valid integer, got 1.5"),
        ({"flops": {"bfloat16": -1}}, "flops.bfloat16: Input should be greater than 0, got -1"),
        ({"link": float("nan")}, "link: Input should be a finite number, got nan"),
        ({"compute_capability": "nine"}, "compute_capability: String should match pattern .*, got 'nine'"),
        ({"speed": 1, 2: 3}, r"card.yaml: unknown key speed; unknown key 2\. .*h100.yaml is an example"),
    ],
)
def test_rejects_invalid_card_files(change, message, tmp_path):
    card = yaml.safe_load((CARDS / "h100.yaml").read_text()) | change
    file = tmp_path / "card.yaml"
    file.write_text(yaml.safe_dump(card))
    with pytest.raises(UserError, match=message):
        parse_target(f"{file}:1x8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected keys as in .*, got None"),
        (b"[1, 2]", r"expected keys as in .*, got \[1, 2\]"),
        (b"name: a card", "missing key compute_capability; missing key cores"),
        (b"name: [", "expected the node content"),
        (b"name: 2024-99-99", "month must be in 1..12"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_rejects_files_that_are_no_cards(content, message, tmp_path):
    file = tmp_path / "card.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"target file .*card\.yaml: (?s:.*){message}"):
        parse_target(f"{file}:1x8")


def test_reads_own_card_file(tmp_path):
    file = tmp_path / "card.yaml"
    file.write_text((CARDS / "h100.yaml").read_text().replace("gpus_per_host: 8", "gpus_per_host: 4"))
    assert parse_target(f"{file}:3x4").size == 12
    with pytest.raises(UserError, match=r"missing\.yaml.*No such file"):
        parse_target(f"{tmp_path / 'missing.yaml'}:1x4")


def test_slices_of_tpus_are_named_by_their_shape():
    target = parse_target("v5p:8x8x16")
    assert (target.size, target.hosts, target.gpus) == (1024, 256, 4)
    assert list_devices(target="v5p:8x8x16")[-1] == "tpu:1023@v5p:8x8x16"
    assert DeviceMesh((8, 128), ("data", "fsdp"), target.device_names()).axes_across_processes == ()


@pytest.mark.parametrize(
    ("text", "group", "links"),
    [
        ("v5p:4x4x4", range(4), 2),  # a ring along the first dim
        ("v5p:4x4x4", range(0, 64, 16), 2),  # along the last one
        ("v5p:4x4x4", range(64), 6),
        ("v5p:4x4x2", range(0, 32, 16), 1),  # two chips in a line
        ("v5p:4x6x4", range(0, 24, 4), 1),  # longer than a ring of 4, and no multiple
        ("v5e:16x16", range(256), 4),
        ("v5e:8x8", range(64), 2),  # only a whole pod wraps around
    ],
)
def test_groups_of_tpus_send_over_the_links_of_their_dims(text, group, links):
    assert parse_target(text).links(group) == links


def test_reads_own_tpu_file(tmp_path):
    file = tmp_path / "card.yaml"
    file.write_text((CARDS / "v5e.yaml").read_text().replace("torus: 2", "torus: two"))
    with pytest.raises(UserError, match="torus: Input should be a valid integer, got 'two'"):
        parse_target(f"{file}:4x4")


TPUS = ("v4", "v5e", "v5p", "v6e")


@pytest.mark.parametrize("name", TPUS)
def test_files_of_tpus_cite_their_sources(name):
    text = (CARDS / f"{name}.yaml").read_text()
    assert f"cloud.google.com/tpu/docs/{name}" in text
    assert parse_target(f"{name}:4x4x4" if name in ("v4", "v5p") else f"{name}:4x4").card.generation == name


@pytest.mark.parametrize("file", sorted({*CARDS.glob("[abgh]*.yaml")}), ids=lambda file: file.stem)
def test_describes_each_card(file):
    """A peak is that of tensor cores: cores x clock x operations in a clock, to within the boost of the clock."""
    card = parse_target(f"{file.stem}:1x8").card
    ways = {"8.0": 2048, "9.0": 4096, "10.0": 8192}[card.compute_capability]
    assert card.flops["bfloat16"] == pytest.approx(card.cores * card.clock_ghz * 1e9 * ways, rel=0.1)
    assert card.name in card.target_config()
    assert "{" not in card.target_config().replace(" {", "")
    assert file.read_text().startswith("# NVIDIA")


@pytest.mark.parametrize(
    ("target", "plugins", "message"),
    [
        ("h100:1x8", "CUDA_PLUGINS", r"not installed .*: pip install 'spmdkit\[targets\]'"),
        ("v5e:2x4", "TPU_PLUGINS", r"TPU compiler .* not installed .*: pip install 'spmdkit\[tpu-targets\]'"),
    ],
)
def test_names_missing_compiler(target, plugins, message, monkeypatch):
    monkeypatch.setattr(targets, plugins, ("missing_plugin",))
    targets.target_devices.cache_clear()
    mesh = DeviceMesh((8,), ("data",), list_devices(target=target))
    with pytest.raises(UserError, match=message):
        _ = mesh.backend_mesh
    assert np.shape(mesh.devices) == (8,)
