"""What process 0 tells the others; the service is JAX's own in tests/multiprocess."""

import pytest
from spmdkit.mesh import coordination
from spmdkit.mesh.coordination import ProcessesMissing, told_by_first


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


def test_all_get_the_text_of_process_0(service, monkeypatch):
    as_rank(0, monkeypatch)
    assert told_by_first("callbacks/1", "mine", seconds=5) == "mine"
    as_rank(1, monkeypatch)
    assert told_by_first("callbacks/1", "theirs", seconds=5) == "mine"


def test_alone_it_is_ones_own():
    assert told_by_first("callbacks/1", "mine", seconds=0) == "mine"


def test_whoever_waits_in_vain_says_for_whom(service, monkeypatch):
    as_rank(1, monkeypatch)
    with pytest.raises(ProcessesMissing, match=r"rank 0 did not come to 'callbacks/1' within 0 s") as raised:
        told_by_first("callbacks/1", "", seconds=0.01)
    assert raised.value.exit_code == 75
    assert max(service.waits) <= 1000


def test_other_errors_of_the_service_pass(service, monkeypatch):
    as_rank(1, monkeypatch)
    monkeypatch.setattr(
        service, "blocking_key_value_get", lambda *_: (_ for _ in ()).throw(RuntimeError("UNAVAILABLE"))
    )
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        told_by_first("callbacks/1", "", seconds=5)
