"""A reader of .safetensors files that knows the specification alone."""

import json
from pathlib import Path

import numpy as np
from spmdkit.models.hugging_face.safetensors import NAMES


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads a file: its arrays, and the texts of its header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    described = json.loads(content[8 : 8 + length])
    metadata = described.pop("__metadata__")
    data = content[8 + length :]
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    spans = sorted(each["data_offsets"] for each in described.values())
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans)][: len(spans)], "without holes"
    assert max((end for _, end in spans), default=0) == len(data)
    arrays = {
        name: np.frombuffer(data[slice(*each["data_offsets"])], dtypes[each["dtype"]]).reshape(each["shape"])
        for name, each in described.items()
    }
    return arrays, metadata
