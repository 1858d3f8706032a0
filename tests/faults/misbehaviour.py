"""Runs on a source that misbehaves: see misbehaving.py."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

from runs import spmdkit, write_config

HERE = Path(__file__).parent


def write(folder: Path, **sections: Any) -> Path:
    """Writes the config of a tiny run whose batches come from misbehaving.py; returns the file."""
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / "misbehaving.py", folder)
    data = {"source": "misbehaving:rows", "prefetch": 1}
    return write_config(folder, **{"data": data, "eval": {"every": 0, "batches": 2}, **sections})


def launch(config: Path, on: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Launches it; the workers misbehave as the variables say."""
    return spmdkit("launch", config, "--on", on, *arguments, timeout=600, PYTHONPATH=str(HERE.parent), **variables)
