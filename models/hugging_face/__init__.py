"""Weights of Hugging Face: folders with a config.json and .safetensors files, of the families Llama, Qwen and GPT-2.

In: a folder. Out: the transformer of its sizes, and its parameters, arrays that lie in the files until a part of them
is asked for. Back: parameters of such a transformer as a folder that `transformers` loads. Read first: `families`,
which names are which arrays. `read` and `write` go there and back, `config_json` is about sizes, `stacked` makes one
array of the blocks' own, `safetensors` is the format of the files, and `from_config` is the model that a config names.
Reading needs the extra `huggingface`, not torch or `transformers`.

`config_json` shares the tests of `read`; `families` shares the tests of `read`.
"""

from .from_config import HuggingFaceConfig as HuggingFaceConfig
from .read import Loaded as Loaded
from .read import load as load
from .write import save as save

__all__ = ["HuggingFaceConfig", "Loaded", "load", "save"]
