import pytest
from spmdkit.training.ending.lost_peers import tells_of_lost_peer, without_heartbeat

GLOO = "INTERNAL: Gloo all-reduce failed: [external/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
UNHEALTHY = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n/job:jax_worker/task:1"


@pytest.mark.parametrize(
    "text",
    [
        GLOO,
        "Gloo AllGather failed: timed out",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] "
        "op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size.",
        "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/0,1/0",
        "Terminating process because the JAX distributed service detected fatal errors.",
        "INTERNAL: Failed to send RPC to coordination service.",
        "DEADLINE_EXCEEDED: Barrier timed out. Id: x",
        UNHEALTHY,
    ],
)
def test_a_survivor_is_known_by_its_words(text):
    assert tells_of_lost_peer(text)


@pytest.mark.parametrize("text", ["RuntimeError: boom", "No space left on device", "the loss is nan", ""])
def test_what_is_ones_own(text):
    assert not tells_of_lost_peer(text)


def test_ranks_without_heartbeat():
    assert without_heartbeat(UNHEALTHY) == [1]
    assert without_heartbeat("The following tasks are unhealthy (stopped sending heartbeats):\n1\n12\nThe tasks") == [
        1,
        12,
    ]
    assert without_heartbeat(GLOO) == []
