"""The embedded data set: the source code of the Python standard library on this machine, as bytes.

Real text that is found wherever Python is: nothing is downloaded. Which files belong to it is fixed here, so that
distributions that leave some parts out, or put more in, still give nearly the same text: every `*.py` below the
standard library's folder, but for tests, installed packages, optional parts (idlelib, lib2to3, distutils, ensurepip,
tkinter, turtledemo), tables (encodings, pydoc_data), and files written at build or install time.
"""

import os
import platform
import sysconfig
from pathlib import Path

from ....mesh.errors import UserError
from ...config import DataConfig
from ..files import FoundFile
from .documents import Corpus
from .text import text_corpus

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "__phello__"}
    | {"idlelib", "lib2to3", "distutils", "ensurepip", "tkinter", "turtledemo"}
    | {"encodings", "pydoc_data"}
)
SKIPPED_FILES = frozenset({"sitecustomize.py", "usercustomize.py", "__phello__.foo.py", "_sysconfig_vars.py"})
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
FEWEST_BYTES = 1 << 20


def stdlib_files(root: Path) -> tuple[FoundFile, ...]:
    """The files of the data set below the standard library's folder, sorted by relative path.

    Args:
        root: The folder, `sysconfig.get_paths()["stdlib"]`.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _skipped(name)]
        paths = [Path(folder, name) for name in names if name.endswith(".py") and not _skipped(name)]
        found += [FoundFile(path, path.relative_to(root).as_posix()) for path in paths]
    return tuple(sorted(found, key=lambda file: file.name))


def _skipped(name: str) -> bool:
    return name in SKIPPED_FOLDERS or name in SKIPPED_FILES or name.startswith(SKIPPED_PREFIXES)


def read_stdlib(patterns: tuple[str, ...], config: DataConfig, key: str) -> Corpus:
    """Reads the standard library's sources as a corpus of bytes.

    Args:
        patterns: Not used: the files are fixed.
        config: Not used: bytes need no options.
        key: Not used.

    Raises:
        UserError: the sources are not there, as in an embedded Python that keeps them in a zip file.
    """
    del patterns, config, key
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = text_corpus(stdlib_files(root), f"source of Python {platform.python_version()}")
    num_bytes = sum(len(document.ids) for document in corpus.documents)
    if num_bytes < FEWEST_BYTES:
        raise UserError(
            f"data.source=stdlib: {root} holds {num_bytes:,} bytes of Python source, fewer than {FEWEST_BYTES:,}. "
            "This Python came without its sources; set data.source: text and data.files to a text of yours."
        )
    return corpus
