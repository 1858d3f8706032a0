import pytest
from spmdkit.mesh.text import counted, is_printable, printable


@pytest.mark.parametrize(
    ("number", "noun", "several", "text"),
    [
        (0, "array", "", "0 arrays"),
        (1, "array", "", "1 array"),
        (1024, "device", "", "1,024 devices"),
        (1, "entry", "entries", "1 entry"),
        (2, "entry", "entries", "2 entries"),
    ],
)
def test_one_is_not_several(number, noun, several, text):
    assert counted(number, noun, several) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("für Zoë ☃ 层", "für Zoë ☃ 层"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\r\x00\x7f\x9b", "\\x0d\\x00\\x7f\\x9b"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("\udcff", "\\udcff"),
        ("\U0010fffd", "\\U0010fffd"),
    ],
)
def test_controls_are_escaped(text, shown):
    assert printable(text) == shown
    assert is_printable(text) == (shown == text and "\n" not in text)
