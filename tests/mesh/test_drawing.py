"""The drawn mesh is short and readable for one device and for a thousand."""

from spmdkit.mesh import DeviceMesh

EIGHT = """\
data=2, fsdp=4: 8 devices, cpu
          fsdp 0  fsdp 1  fsdp 2  fsdp 3
  data 0  cpu:0   cpu:1   cpu:2   cpu:3
  data 1  cpu:4   cpu:5   cpu:6   cpu:7"""


def targets(count: int) -> list[str]:
    return [f"cuda:{number}" for number in range(count)]


def test_draws_eight_devices():
    assert str(DeviceMesh.of(data=2, fsdp=4)) == EIGHT
    assert repr(DeviceMesh.of(data=2, fsdp=4)) == "DeviceMesh(data=2, fsdp=4; 8 devices)"


def test_draws_one_axis():
    lines = str(DeviceMesh((4,), ("batch",), targets(4))).splitlines()
    assert lines[1:] == ["batch 0  batch 1  batch 2  batch 3", "cuda:0   cuda:1   cuda:2   cuda:3"]


def test_draws_one_device():
    assert str(DeviceMesh.of(["cpu:0"])).splitlines()[1:] == ["tensor 0", "cpu:0"]


def test_draws_three_axes():
    lines = str(DeviceMesh.of(targets(8), data=2, fsdp=2, tensor=2)).splitlines()
    assert lines[1].split() == ["tensor", "0", "tensor", "1"]
    assert lines[3].split() == ["data", "0", "fsdp", "1", "cuda:2", "cuda:3"]
    assert len(lines) == 6


def test_draws_a_thousand_devices_on_one_screen():
    lines = str(DeviceMesh.of(targets(1024), data=32, fsdp=32)).splitlines()
    assert lines[0] == "data=32, fsdp=32: 1,024 devices, cuda"
    assert len(lines) == 18
    assert max(map(len, lines)) <= 100
    assert lines[-1].split() == ["data", "31", *(f"cuda:{992 + n}" for n in range(6)), "...", "cuda:1023"]
    assert set(lines[-2].split()) == {"..."}


def test_says_which_axes_cross_processes(monkeypatch):
    mesh = DeviceMesh.of(data=2, fsdp=4)
    monkeypatch.setattr(DeviceMesh, "axes_across_processes", ("data",))
    assert str(mesh) == EIGHT + "\n  crosses processes: data"
