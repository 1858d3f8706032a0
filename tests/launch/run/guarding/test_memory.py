"""A state that cannot fit is told before anything is compiled; one that can is let through."""

import resource
from pathlib import Path

import pytest
from runs import write_config
from spmdkit.configs import load_config
from spmdkit.launch.run.build import build
from spmdkit.launch.run.guarding import memory
from spmdkit.launch.run.guarding.memory import check_memory, measured_memory
from spmdkit.mesh.errors import UserError

WIDE = ["model.widths=[16000000, 1000000]"]  # 1.6e13 parameters, and adamw's two averages of each


def built(folder, *overrides: str):
    return build(load_config(write_config(folder), overrides))


def test_a_state_beyond_the_machine(tmp_path):
    with pytest.raises(UserError) as info:
        check_memory(built(tmp_path, *WIDE))
    said = str(info.value)
    assert (
        "The state of this run does not fit: parameters and optimizer take 43.7 TiB on each device, 8 x 43.7 TiB"
        in said
    )
    assert "and this machine has " in said
    assert "strategy.fsdp" in said


def test_a_state_that_fits(tmp_path):
    check_memory(built(tmp_path))


def test_a_limit_on_the_process(tmp_path, monkeypatch):
    """8 devices hold 2,410 parameters and two averages, over `fsdp: 4`: 60 KiB are enough, 20 are not."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20 * 1024, 20 * 1024))
    with pytest.raises(UserError, match=r"ulimit -v allows 20 KiB"):
        check_memory(built(tmp_path))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (80 * 1024, 80 * 1024))
    check_memory(built(tmp_path))


class Accelerator:
    """What a GPU says of itself."""

    platform = "gpu"

    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}


@pytest.mark.parametrize(("limit", "fits"), [(1 << 10, False), (1 << 20, True), (None, True)])
def test_each_device_of_its_own_memory(limit, fits, tmp_path, monkeypatch):
    run = built(tmp_path)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Accelerator(limit)] * 8)
    if fits:
        check_memory(run)
    else:
        with pytest.raises(UserError, match=r"and a device has 1 KiB"):
            check_memory(run)


def test_the_most_that_was_in_use_is_that_of_the_system():
    """On processors it is the resident memory of this process, which holds all its devices."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    most = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert measured_memory() == {"the process, with 8 devices": pytest.approx(most, rel=0.05)}
