"""Weights of Hugging Face: directories with config.json and .safetensors files, of the families Llama, Qwen and GPT-2.

Input: a directory. Output: its transformer, and its parameters as arrays that are read from the files on demand. And
back: parameters of such a transformer as a directory that `transformers` loads. Read first: `families`, the names of
the arrays. `config_json` converts sizes, `weights_reader` and `weights_writer` read and write, and `safetensors` is
the file format. Reading needs the extra `huggingface`, but not torch or `transformers`.
"""

from .weights_reader import HuggingFaceConfig as HuggingFaceConfig
from .weights_reader import Loaded as Loaded
from .weights_reader import load as load
from .weights_writer import save as save
