"""Text for people: counts of things; and what would move a terminal's cursor, change its colours or turn the line
around is written as an escape.
"""

import unicodedata

ALLOWED = "\n\t"
"""Control characters that are let through."""
INVISIBLE = ("Cc", "Cs", "Co", "Zl", "Zp")
"""Unicode categories that are escaped: controls, lone surrogates, private use, separators of lines and paragraphs."""
TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of what follows."""


def counted(number: int, noun: str, several: str = "") -> str:
    """Writes a count for people.

    Args:
        number: How many.
        noun: What, as one of them is called.
        several: As more of them are called; by default the noun with an "s".

    Returns:
        For example "1 array", "1,024 devices".
    """
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def printable(text: str) -> str:
    """Returns a text with its control characters, but for newline and tab, written as escapes: `\\x1b`."""
    if text.isascii() and all(character.isprintable() or character in ALLOWED for character in text):
        return text
    return "".join(_escaped(character) if _is_hidden(character) else character for character in text)


def is_printable(text: str) -> bool:
    """Tells whether a text holds no control characters at all, so that it may stand in a message as it is."""
    return not any(character in ALLOWED or _is_hidden(character) for character in text)


def _is_hidden(character: str) -> bool:
    if character in ALLOWED:
        return False
    return character in TURNING or unicodedata.category(character) in INVISIBLE


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
