"""What process 0 tells the others, and keys that differ; the service is JAX's own in tests/multiprocess."""

import pytest
from spmdkit.mesh import processes as coordination
from spmdkit.mesh.processes import ProcessesMissing, broadcast_text, unequal


class Service:
    """Answers what was set, and has no patience otherwise."""

    def __init__(self):
        self.values, self.waits = {}, []

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        self.waits.append(milliseconds)
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setattr(coordination, "coordination_client", lambda: service)
    return service


def as_rank(rank, monkeypatch):
    monkeypatch.setattr(coordination.jax, "process_index", lambda: rank)


def test_broadcasts_the_text_of_process_0(service, monkeypatch):
    as_rank(0, monkeypatch)
    assert broadcast_text("callbacks/1", "mine", seconds=5) == "mine"
    as_rank(1, monkeypatch)
    assert broadcast_text("callbacks/1", "theirs", seconds=5) == "mine"


def test_one_process_gets_its_own_text():
    assert broadcast_text("callbacks/1", "mine", seconds=0) == "mine"


def test_reports_the_missing_rank_at_the_timeout(service, monkeypatch):
    as_rank(1, monkeypatch)
    with pytest.raises(ProcessesMissing, match=r"rank 0 did not come to 'callbacks/1' within 0 s") as raised:
        broadcast_text("callbacks/1", "", seconds=0.01)
    assert raised.value.exit_code == 75
    assert max(service.waits) <= 1000


def test_passes_other_errors_of_the_service(service, monkeypatch):
    as_rank(1, monkeypatch)
    monkeypatch.setattr(
        service, "blocking_key_value_get", lambda *_: (_ for _ in ()).throw(RuntimeError("UNAVAILABLE"))
    )
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        broadcast_text("callbacks/1", "", seconds=5)


def test_unequal_keys_differ_in_any_mapping():
    assert unequal([{"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 2}, {"a": 1, "b": 2, "c": 3}], 0) == {
        "a": [1, 4, 1],
        "c": [3, 0, 3],
    }
