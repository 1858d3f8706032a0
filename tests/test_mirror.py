"""Every file has a test file of its name in the mirrored place, or its room says which one it shares."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("mesh", "layouts", "parallel", "models", "data", "training", "configs", "launch")
FILES = [
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
]
MOST_SHARING = {"mesh": 8, "layouts": 4, "parallel": 5, "models": 10, "training": 4, "launch": 10}
"""Fewer is better; more has to be argued here."""
SHARING = re.compile(r"`(\w+)`\s+shares\s+the\s+tests\s+of\s+`([\w/]+)`")
"""How a room's `__init__` says it: a file of the same room, or one elsewhere by its path."""
ABOUT_SEVERAL = {
    "parallel": ("test_as_predicted.py", "test_equivalence.py", "test_new_strategy.py"),
    "parallel/verification": ("test_planted_mistakes.py", "test_planted_in_split_work.py"),
    "layouts": ("test_keras_examples.py",),
    "layouts/importing": ("test_against_libraries.py",),
    "models": ("test_mixed_precision.py", "test_reference.py"),
    "models/adapters": ("test_forms_of_modules.py", "test_documented_models.py", "test_mistakes.py"),
    "models/hugging_face": ("test_against_transformers.py", "test_example.py"),
    "data/sources": ("test_against_libraries.py",),
    "data": ("test_examples.py", "test_processes.py"),
    "launch": ("test_bad_places.py",),
    "launch/run": ("test_ema.py", "test_loss_scaling.py"),
    "training/report": ("test_report_in_chromium.py",),
}
"""Tests of how the files of a room work together, or against another library."""


OF_PROCESSES = ("launch/run/directory/shared.py", "launch/run/guarding/agreement.py")
"""What several processes do: their tests are in multiprocess/."""


def where_tested(file: Path) -> Path:
    return TESTS / ("multiprocess" if file.as_posix() in OF_PROCESSES else file.parent) / f"test_{file.name}"


def sharing(room: Path) -> dict[str, Path]:
    """Name of a file of the room -> the file whose tests serve it too."""
    said = SHARING.findall((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    return {name: (Path(other) if "/" in other else room / other).with_suffix(".py") for name, other in said}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_has_tests(package):
    missing = [file for file in FILES if file.parts[0] == package and not where_tested(file).is_file()]
    shared = [sharing(file.parent).get(file.stem, Path("none.py")) for file in missing]
    alone = [file.as_posix() for file, other in zip(missing, shared, strict=True) if not where_tested(other).is_file()]
    assert not alone, f"no test file of these names: {', '.join(alone)}"
    assert len(missing) <= MOST_SHARING.get(package, 0)


def test_what_is_said_to_share_has_no_tests_of_its_own():
    for room in {file.parent for file in FILES}:
        for name, other in sharing(room).items():
            assert not where_tested(room / f"{name}.py").is_file(), f"{room}/{name}.py"
            for file in (room / f"{name}.py", other):
                assert (ROOT / file).is_file(), f"{room}/__init__.py names {file}, which there is not"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_test_file_mirrors_a_file(package):
    for path in sorted((TESTS / package).rglob("test_*.py")):
        room = path.parent.relative_to(TESTS)
        file = room / path.name.removeprefix("test_")
        assert (ROOT / file).is_file() or path.name in ABOUT_SEVERAL.get(room.as_posix(), ()), f"{path} mirrors no file"


def test_what_is_about_several_files_is_there():
    assert [str(TESTS / room / name) for room, names in ABOUT_SEVERAL.items() for name in names] == [
        str(path)
        for room, names in ABOUT_SEVERAL.items()
        for path in (TESTS / room / name for name in names)
        if path.is_file()
    ]
