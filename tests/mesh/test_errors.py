"""Messages about unknown names propose the known one that is meant."""

import pytest
from spmdkit.mesh import errors
from spmdkit.mesh.errors import (
    counted,
    did_you_mean,
    hub_hint,
    is_printable,
    nearest,
    printable,
    unknown_name,
    unknown_options,
)


@pytest.mark.parametrize(
    ("name", "known", "options", "end"),
    [
        ("stps", ["steps", "seed"], {}, " Did you mean steps?"),
        ("adamW", ["AdamW", "adam"], {}, " Did you mean AdamW?"),
        ("stps", ["steps", "seed"], {"prefix": "train."}, " Did you mean train.steps?"),
        ("step", ["steps", "stop"], {"count": 2, "prefix": "a."}, " Did you mean a.steps or a.stop?"),
        ("zzz", ["steps"], {}, ""),
        (3, ["steps", "seed"], {"otherwise": "Choose from"}, " Choose from steps, seed."),
        ("zzz", [], {"otherwise": "There are"}, " There are none."),
    ],
)
def test_did_you_mean(name, known, options, end):
    assert did_you_mean(name, known, **options) == end


def test_a_name_on_the_hub_is_downloaded_first(tmp_path):
    message = hub_hint(tmp_path / "Qwen" / "Qwen3-0.6B")
    assert message.endswith(": hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B.")
    assert "hf download --repo-type dataset a/b --local-dir b." in hub_hint(tmp_path / "a/b", "dataset")
    for path in (tmp_path, tmp_path / "weights", tmp_path / "a*" / "b", "weights"):
        assert hub_hint(path) == ""


def test_nearest_respects_the_cutoff():
    assert nearest("groupz", ["pairs", "groups"]) == ["groups"]
    assert nearest("grp", ["pairs", "ring_of_groups"]) == []
    assert nearest("grp", ["pairs", "ring_of_groups"], cutoff=0.3) == ["ring_of_groups"]


def test_unknown_name_lists_known_ones():
    assert unknown_name("mesh axis", "dat", ["data", "fsdp"]) == (
        "Unknown mesh axis 'dat'; known: data, fsdp. Did you mean 'data'?"
    )
    assert unknown_name("mesh axis", "zzz", ["data", "fsdp"]) == "Unknown mesh axis 'zzz'; known: data, fsdp."


def test_unknown_options_are_separate_problems():
    assert unknown_options(["lenght", "x"], ["length", "width"], "model") == [
        "model.lenght is not an option. Did you mean length?",
        "model.x is not an option. The options are length, width.",
    ]
    assert unknown_options(["x"], ["a"], "optimizer.schedule", of="wsd") == [
        "optimizer.schedule.x is not an option of wsd. The options are a."
    ]


def test_lists_a_number_of_problems():
    assert errors.first_lines(["a", "b"], 2) == ["a", "b"]
    assert errors.first_lines(["a", "b", "c"], 2) == ["a", "b", "... and 1 more"]


def test_counted():
    assert [counted(number, "device") for number in (0, 1, 1024)] == ["0 devices", "1 device", "1,024 devices"]
    assert [counted(number, "entry", "entries") for number in (1, 2)] == ["1 entry", "2 entries"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("für Zoë ☃ 层", "für Zoë ☃ 层"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\r\x00\x7f\x9b", "\\r\\x00\\x7f\\x9b"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("\udcff", "\\udcff"),
        ("\U0010fffd", "\\U0010fffd"),
    ],
)
def test_printable_escapes_controls(text, shown):
    assert printable(text) == shown
    assert is_printable(text) == (shown == text and "\n" not in text)
