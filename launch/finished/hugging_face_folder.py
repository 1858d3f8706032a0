"""The parameters of a run as a folder that `transformers` loads: adapters merged, names those of the family."""

from pathlib import Path

import jax

from ...mesh.errors import UserError
from ...models.catalog import transformer_of, without_adapters
from ...models.hugging_face.write import save
from ..inspection.finding import shown
from ..run.build import search_path
from .loaded_run import LoadedRun


def write_folder(run: LoadedRun, target: Path) -> str:
    """Writes config.json and .safetensors files.

    Args:
        run: A run of the model `hugging_face`, or of a transformer whose arrangement a family has.
        target: The folder; it must not exist. What else the folder that the run started from says of tokens, and its
            tokenizer, is taken over.

    Returns:
        One line: what was written.

    Raises:
        UserError: The model is none of a family, the folder exists, or several processes hold the parameters.
        OSError: There is no room.
    """
    if jax.process_count() > 1:
        raise UserError("A folder of Hugging Face is written by one process. Start the command without a launcher.")
    spec, facts, folders = run.config.model, run.facts, search_path(run.config)
    config, origin = transformer_of(spec, facts, folders)
    params = without_adapters(spec, run.params, facts, folders)
    save(target, config, params, like=origin or None)
    return f"Wrote {shown(target.absolute())}: config.json and the weights of step {run.step}, for transformers."
