"""Checksums of arrays: the same on every mesh, different for every other array; and of the description."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spmdkit.checkpoints import checksums as checksums_file
from spmdkit.checkpoints.checksums import checksums, host_checksum, read_description
from spmdkit.checkpoints.damage import DamagedCheckpoint
from spmdkit.checkpoints.integrity import verify_one
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.checkpoints.restore import StoredCheckpoint
from support.checkpoint_states import abstract, assert_equal, host_state, opened, placed

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "float8_e4m3fn"]


def one(array) -> int:
    return int(checksums({"a": jnp.asarray(array)})[0])


def numbers(dtype, shape=(16, 6)):
    return np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape).astype(jnp.dtype(dtype))


def plain(array) -> int:
    """The same sum, word by word, in Python."""
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[array.dtype.itemsize]
    total = 0
    for index, word in enumerate(np.ascontiguousarray(array).reshape(-1).view(width).tolist()):
        total += mix((word + mix(index)) % 2**32)
    return total % 2**32


def mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int64"])
def test_device_and_host_compute_the_same_sum(dtype, float64, monkeypatch):
    values = numbers(dtype)
    assert one(values) == host_checksum(values) == plain(values)
    monkeypatch.setattr(checksums_file, "MAX_WORDS", 7)
    assert host_checksum(values.T) == plain(values.T)
    scalar = np.asarray(values[3, 3])
    assert one(scalar) == host_checksum(scalar) == plain(scalar)


@pytest.mark.parametrize("spec", [("x", None), (None, "y"), ("x", "y"), (("x", "y"), None)])
def test_the_sum_is_the_same_on_every_mesh(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    values = numbers("float32")
    split = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    assert int(checksums({"a": split})[0].addressable_data(0)) == plain(values)


def test_sums_are_in_the_order_of_the_paths():
    arrays = {"b": jnp.ones(3), "a": jnp.zeros(2), "c": jnp.float32(5)}
    assert checksums(arrays).tolist() == [one(arrays[path]) for path in "abc"]
    assert checksums({}).tolist() == [0]


# The description

NOTES = {"callbacks": [["early_stopping", {"best": 2, "waited": 1}]], "data": {"batch": 10}}


@pytest.fixture
def noted(tmp_path):
    """A directory with checkpoints of steps 10 and 20 that contain notes."""
    state = placed(host_state(0), 2, "data", split=False)
    with Checkpoints(tmp_path / "checkpoints", keep=3, abstract_state=abstract(state), about={"a": 1}) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, placed(host_state(step), 2, "data", split=False), notes=NOTES)
    return tmp_path / "checkpoints"


def test_a_changed_note_makes_the_run_go_back(noted):
    path = noted / "20" / "description.json"
    path.write_text(path.read_text().replace('"best": 2', '"best": 3'))
    assert "description.json contains other bytes than were saved" in str(verify_one(noted / "20"))
    assert verify_one(noted / "10").is_whole
    lines = []
    with opened(noted) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match=r"description\.json"):
            checkpoints.notes(20)
        restored = checkpoints.restore_newest(5, lines.append)
        assert (restored.step, checkpoints.notes(10)) == (10, NOTES)
    assert_equal(restored.state, host_state(10))
    assert "Going back to the checkpoint before it." in lines[0]


@pytest.mark.slow
def test_every_changed_byte_of_the_description_is_found(noted):
    checkpoint = noted / "20"
    description = read_description(checkpoint)
    assert (description["about"], description["notes"]) == ({"a": 1}, NOTES)
    data = ("d", "ocdbt.process_0", "commit_success.txt", "_CHECKPOINT_METADATA")  # nothing reads the last two
    files = [path for path in checkpoint.rglob("*") if path.is_file() and not {*path.parts} & {*data}]
    assert {"_METADATA", "_sharding", "process_0", "description.json"} <= {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        for position in {*range(0, len(whole), 7), len(whole) - 1}:
            if path.name == "description.json" and not whole[position : position + 1].strip():
                continue  # another space between two entries is the same description
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(DamagedCheckpoint):
                StoredCheckpoint(checkpoint)
        path.write_bytes(whole)
    assert verify_one(checkpoint).is_whole


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"description": 3}', b'{"sha256": "x"}', b"\xff\x00"])
def test_an_invalid_description_is_damage(noted, text):
    (noted / "20" / "description.json").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match="/20 is damaged: "):
        StoredCheckpoint(noted / "20")
