import pytest
from spmdkit.launch.diagnosis import machine
from spmdkit.launch.diagnosis.machine import GIB, cores, host_name, language, limits, memory, shared_memory


def test_this_host():
    found = machine.machine(8)
    assert {"cores", "memory", "open files", "host name", "locale"} <= {finding.name for finding in found}


@pytest.mark.parametrize(("devices", "count", "level"), [(0, 2, "ok"), (8, 2, "note"), (8, 8, "ok"), (2, 1.5, "note")])
def test_cores(devices, count, level):
    assert cores(devices, count).level == level


@pytest.mark.parametrize(("available", "level"), [(8 * GIB, "ok"), (GIB // 2, "wrong"), (None, "ok")])
def test_memory(available, level):
    assert memory(available).level == level


@pytest.mark.parametrize(
    ("files", "addresses", "levels"),
    [(65536, -1, ["ok"]), (-1, -1, ["ok"]), (256, -1, ["wrong"]), (4096, 20 * GIB, ["ok", "note"])],
)
def test_limits(files, addresses, levels):
    assert [finding.level for finding in limits(files, addresses)] == levels


@pytest.mark.parametrize(
    ("ip", "level", "found"),
    [
        ("10.0.0.1", "ok", "n1 is 10.0.0.1"),
        ("127.0.1.1", "ok", "n1 is 127.0.1.1: enough for one host, not for several"),
        ("", "wrong", "n1 does not resolve"),
    ],
)
def test_host_name(ip, level, found):
    finding = host_name("n1", ip)
    assert (finding.level, finding.found) == (level, found)


def test_a_locale_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    found = language()
    assert (found.level, found.found) == ("note", "xx_XX.UTF-8, which this host does not have")


def test_groups_limit_cores_and_memory(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    assert machine._cores() == 0.5
    assert machine._available() == 2000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine._cores() >= 1


def test_shared_memory_matters_beside_gpus(tmp_path, monkeypatch):
    assert shared_memory(tmp_path) == []
    monkeypatch.setattr(machine, "gpus_of_host", lambda: 8)
    monkeypatch.setattr(machine, "LEAST_SHARED_MEMORY", 2**62)
    (found,) = shared_memory(tmp_path)
    assert (found.level, found.fix) == ("wrong", "start the container with --shm-size=8g, or --ipc=host")
