"""Every file of parallel/ has a test file of its name in the mirrored place, or its room says which one it shares."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "parallel").rglob("*.py")) if path.name != "__init__.py"]
MOST_SHARING = 5
SHARING = re.compile(r"`(\w+)` shares the tests of `(\w+)`")
"""How a room's `__init__` says it."""


def where_tested(file: Path) -> Path:
    return ROOT / "tests" / file.parent / f"test_{file.name}"


def shared(file: Path) -> str:
    """The file of the same room whose tests serve this one too, or ""."""
    said = SHARING.findall((ROOT / file.parent / "__init__.py").read_text(encoding="utf-8"))
    return dict(said).get(file.stem, "")


def test_every_file_has_tests():
    missing = [file for file in FILES if not where_tested(file).is_file()]
    alone = [file.as_posix() for file in missing if not where_tested(file.with_name(f"{shared(file)}.py")).is_file()]
    assert not alone, f"no test file of these names: {', '.join(alone)}"
    assert len(missing) <= MOST_SHARING


def test_what_is_said_to_share_has_no_tests_of_its_own():
    for room in {file.parent for file in FILES}:
        text = (ROOT / room / "__init__.py").read_text(encoding="utf-8")
        for name, _ in SHARING.findall(text):
            assert not where_tested(room / f"{name}.py").is_file(), f"{room}/{name}.py"
            assert (ROOT / room / f"{name}.py").is_file(), f"{room}/__init__.py names {name}, which there is not"


ABOUT_ALL = ("test_equivalence.py", "test_new_strategy.py")


def test_every_test_file_mirrors_a_file():
    """The table of equivalence is about all of them, and the new strategy stands for one of yours."""
    for path in sorted((ROOT / "tests" / "parallel").rglob("test_*.py")):
        file = path.relative_to(ROOT / "tests").with_name(path.name.removeprefix("test_"))
        assert (ROOT / file).is_file() or path.name in ABOUT_ALL, f"{path} tests no file of its name"
