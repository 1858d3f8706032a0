"""The model that a config names: `model: {name: hugging_face, folder: ...}`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...mesh.errors import UserError
from ...parallel.model import BlockModel, Params
from ..transformer import transformer
from .read import load_params, transformer_config


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A transformer with the sizes of a folder of Hugging Face; training starts from its weights."""

    folder: str = ""
    """Folder with config.json and .safetensors files (Llama, Qwen2, Qwen3 or GPT-2), below run.root."""
    vocabulary: int = 0
    """Number of different tokens in the data, at most the folder's; 0 = the data's."""
    length: int = 0
    """Positions in a row, for counting operations; 0 = the data's."""
    weights: bool = True
    """Whether training starts from the folder's weights; false draws new ones."""
    dropout: float = 0.0
    """Part of the values dropped after the embedding and after each half of a block; 0 <= dropout < 1."""
    scan_unroll: int = 1
    """Blocks in one turn of the loop over blocks, as in the transformer."""


def hugging_face(config: HuggingFaceConfig) -> BlockModel:
    """Builds the transformer of a folder.

    The headers of the files are read too, so that what does not fit is told before anything is compiled.

    Raises:
        UserError: No folder is given; it cannot be read, is of no family here, does not hold the weights of its
            config.json, or has fewer tokens than the data.
    """
    if not config.folder:
        raise UserError("model.folder is not given: a folder with config.json and .safetensors files.")
    if not Path(config.folder).is_dir():
        raise UserError(
            f"model.folder={config.folder} is no folder, neither below run.root nor in the working directory. Give one "
            "as `save_pretrained` or a download leaves it."
        )
    sizes = transformer_config(
        Path(config.folder), length=config.length, dropout=config.dropout, scan_unroll=config.scan_unroll
    )
    if config.vocabulary > sizes.vocabulary:
        raise UserError(
            f"The data has {config.vocabulary} tokens and model.folder={config.folder} {sizes.vocabulary}. Tokenize "
            "the data with the model's own tokenizer."
        )
    model = transformer(sizes)
    weights_of(config, model)
    return model


def weights_of(config: HuggingFaceConfig, model: BlockModel) -> Params | None:
    """The parameters that training starts from, as `read.Loaded.params`; None where they are drawn.

    Raises:
        UserError: The files do not hold the model.
    """
    return load_params(Path(config.folder), model) if config.weights else None


def find_folder(folder: str, search_path: Sequence[str | Path]) -> str:
    """A folder below one of some places, the first that has it; itself where none has."""
    places = [Path(place) / folder for place in search_path]
    return str(next((place for place in places if place.is_dir()), folder))
