from spmdkit.launch.diagnosis.finding import Finding, as_text, from_plain, is_wrong

FINE = Finding("host name", "a is 10.0.0.1")
BAD = Finding("GPUs", "none visible", "wrong", "unset CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def test_as_lines():
    assert FINE.lines() == ["  ok    host name     a is 10.0.0.1"]
    assert BAD.lines("rank 3") == [
        "  WRONG GPUs          rank 3: none visible (CUDA_VISIBLE_DEVICES)",
        "                      fix: unset CUDA_VISIBLE_DEVICES",
    ]


def test_what_all_say_is_said_once():
    own = Finding("host name", "b is 10.0.0.2")
    assert as_text([[FINE, BAD], [own, BAD]]) == [
        "  ok    host name     rank 0: a is 10.0.0.1",
        "  ok    host name     rank 1: b is 10.0.0.2",
        *BAD.lines(),
    ]


def test_whether_anything_is_wrong():
    assert is_wrong([FINE, BAD])
    assert not is_wrong([FINE, BAD._replace(level="note")])


def test_there_and_back():
    assert from_plain([list(FINE), list(BAD)]) == [FINE, BAD]
