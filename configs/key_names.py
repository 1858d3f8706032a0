"""Names of config keys: every key, its synonyms in other libraries, and suggestions for unknown keys."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from ..mesh.axes import SYNONYMS as AXIS_SYNONYMS
from ..mesh.errors import did_you_mean, nearest
from ..models.catalog import MODELS
from ..models.lora import LoRAConfig
from ..parallel.sharding.strategies import axis_names, option_types
from .config_errors import Problem
from .schema import Config, ModelCheck

MAX_SUGGESTIONS = 3
SYNONYMS = {
    "optimizer.learning_rate": "lr learningrate max_lr peak_lr base_lr step_size",
    "optimizer.weight_decay": "wd decay l2",
    "optimizer.betas": "beta beta1 beta2 b1 b2 adam_betas",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.name": "optim optimiser optimizer_name optimizer_type",
    "optimizer.schedule": "scheduler lr_scheduler lr_schedule warmup warmup_steps warmup_ratio",
    "train.global_batch": "batch_size batch bs batchsize global_batch_size train_batch_size",
    "train.accumulate": "gradient_accumulation_steps grad_accum micro_batches accumulate_grad_batches",
    "train.steps": (
        "epochs num_epochs max_epochs n_epochs num_train_steps total_steps max_steps iterations iters max_iters"
    ),
    "train.clip_norm": "grad_clip gradient_clipping clip clip_grad max_grad_norm clip_grad_norm",
    "train.remat": "checkpointing gradient_checkpointing activation_checkpointing recompute grad_checkpoint",
    "precision.compute": "dtype mixed_precision bf16 fp16 amp compute_dtype half",
    "precision.params": "param_dtype params_dtype",
    "precision.reduce": "reduce_dtype grad_dtype",
    "data.length": "seq_len seq_length sequence_length context_length max_seq_len block_size ctx_len",
    "data.files": "path paths data_path train_files dataset data_dir train_data",
    "data.eval_files": "val_files valid_files test_files validation_files eval_data",
    "data.threads": "num_workers workers",
    "model.width": "d_model hidden_size hidden_dim n_embd dim embed_dim hidden",
    "model.layers": "n_layers num_layers n_layer depth num_hidden_layers num_blocks",
    "model.heads": "n_heads num_heads n_head num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads",
    "model.mlp_width": "d_ff ffn_dim intermediate_size mlp_dim ff_dim",
    "model.vocabulary": "vocab vocab_size n_vocab",
    "run.dir": "output_dir out_dir save_dir workdir logdir log_dir output",
    "run.seed": "random_seed rng_seed prng_seed",
    "run.simulate": "devices num_devices n_devices ngpus num_gpus",
    "run.log_every": "log_interval logging_steps log_every_n_steps log_steps",
    "eval.every": "eval_interval eval_steps val_interval evaluate_every",
    "checkpoint.every": "save_every save_steps save_interval ckpt_every checkpoint_every",
    "checkpoint.keep": "save_total_limit max_to_keep keep_last",
    "strategy.data.zero": "zero zero1 zero2 zero_stage",
    "strategy.data.compress": "compression quantize",
    "strategy.data.local_steps": "diloco local_sgd sync_every",
    "strategy.fsdp.floor_bytes": "min_num_params min_size min_weight_size",
    "strategy.fsdp.keep": "reshard reshard_after_forward",
    "strategy.pipe.virtual": "virtual_stages num_virtual_stages num_chunks chunks",
    "strategy.pipe.microbatches": "num_microbatches n_microbatches",
}
"""Key -> its names in other libraries, in lowercase; the synonyms of axes are in mesh/axes.py."""
SIZES = ("degree", "devices", "num_devices", "world_size", "num_stages", "stages", "ways", "n")
"""Names in other libraries for the size of an axis, such as `pipe: {stages: 4}`."""

REMARKS = {
    "epochs num_epochs max_epochs n_epochs": (
        "It counts optimizer steps; an epoch is the number of training examples / train.global_batch of them."
    ),
    "batch_size batch bs batchsize train_batch_size": "It counts the rows of a step over all devices and microbatches.",
    "scheduler lr_scheduler lr_schedule warmup warmup_steps warmup_ratio": (
        "It is a mapping: {name: warmup_cosine, warmup_steps: 100}."
    ),
    "zero zero_stage": "It is 1 or 2; ZeRO-3 is strategy.fsdp.",
    "bf16 fp16 amp half mixed_precision": "It is a dtype: bfloat16.",
    "devices num_devices n_devices ngpus num_gpus": (
        "It is the number of simulated CPU devices; without it, the run uses all devices of the machine."
    ),
}
"""Synonyms -> the difference, if our value has another meaning."""
_PAIRS = [(name, key) for key, names in SYNONYMS.items() for name in names.split()]
_PAIRS += [(name, f"strategy.{axis}") for name, axis in AXIS_SYNONYMS.items()]


def find_synonym(path: str) -> str | None:
    """Returns the key for which other libraries use an unknown key, or None.

    Args:
        path: The unknown dotted key, such as `strategy.dp`, `train.lr` or `lr`. Keys of its own section go first; an
            axis is only suggested in `strategy`.
    """
    section, _, name = path.rpartition(".")
    name = name.lower()
    axis = section.removeprefix("strategy.")
    if axis in axis_names() and section != axis and (name in (axis, *SIZES) or AXIS_SYNONYMS.get(name) == axis):
        return f"{section}.size"
    keys = [key for synonym, key in _PAIRS if synonym == name]
    own = [key for key in keys if key.startswith(f"{section}.")]
    others = [key for key in keys if section != "strategy" and not (section and key.startswith("strategy."))]
    return next(iter([*own, *others]), None)


def find_remark(name: str) -> str:
    """Returns, after a space, the difference between a synonym and our key, or "".

    Args:
        name: A synonym as typed: `epochs`, `train.epochs`, `--epochs`.
    """
    name = name.rpartition(".")[2].lstrip("-").replace("-", "_").lower()
    return next((f" {remark}" for names, remark in REMARKS.items() if name in names.split()), "")


def unknown_key(parent: str, name: str, valid: Sequence[str], kind: str = "key") -> Problem:
    """Returns the problem of an unknown key, with the most similar valid key or all valid keys.

    Args:
        parent: The dotted key of the mapping that contains it; "" for the whole config.
        name: The unknown key.
        valid: The valid keys there.
        kind: The word for a key in the message.
    """
    prefix = f"{parent}." if parent else ""
    path = prefix + name
    first, dot, rest = name.partition(".")
    if dot and first in valid:
        nested = f"{first}: {{{rest.replace('.', ': {')}: ...{'}' * name.count('.')}"
        hint = f" In a file, dots do not separate keys: write {nested}."
    elif found := _keys_for(prefix, name):
        found = [prefix + last if parent and (last := key.rpartition(".")[2]) in valid else key for key in found]
        hint = f" Did you mean {' or '.join(dict.fromkeys(found))}?{find_remark(name)}"
    else:
        hint = did_you_mean(name, valid, prefix=prefix) or f" Valid {kind}s: {', '.join(valid)}."
    return Problem(path, f"{path} is not a valid {kind}.{hint}")


def _keys_for(prefix: str, name: str) -> list[str]:
    """Returns at most MAX_SUGGESTIONS keys below a prefix that end with a name, or the key of which it is a synonym."""
    ending = [key for key in config_keys() if key.startswith(prefix) and key.endswith(f".{name}")]
    ending = sorted((key for key in ending if key != prefix + name), key=lambda key: key.count("."))
    synonym = find_synonym(prefix + name)
    return ending[:MAX_SUGGESTIONS] or ([synonym] if synonym else [])


def sections() -> tuple[str, ...]:
    """Returns the names of all sections."""
    return tuple(field.name for field in fields(Config) if field.name != "source")


@cache
def config_keys() -> tuple[str, ...]:
    """Returns every dotted key, including those of all strategies and all models of the catalog."""
    values = {name: getattr(Config(), name) for name in sections()}
    keys = [key for name, value in values.items() if is_dataclass(value) for key in _keys_below(name, value)]
    keys += [f"model.{name}" for name in ("name", *(field.name for field in fields(ModelCheck)))]
    keys += [f"model.lora.{field.name}" for field in fields(LoRAConfig)]
    keys += [f"model.{field.name}" for options, _ in MODELS.values() for field in fields(options)]
    for name, options in option_types().items():
        keys += [f"strategy.{name}", *(f"strategy.{name}.{field.name}" for field in fields(options))]
    return tuple(dict.fromkeys(keys))


def _keys_below(path: str, section: Any) -> Iterator[str]:
    """Yields the dotted keys of a section and of its subsections."""
    for field in fields(section):
        value, key = getattr(section, field.name), f"{path}.{field.name}"
        yield from _keys_below(key, value) if is_dataclass(value) else (key,)


def suggest_keys(name: str) -> list[str]:
    """Returns at most MAX_SUGGESTIONS keys for a name such as `steps`, `lr`, `train.steps` or `global-batch`.

    Args:
        name: A key, its last part, a name from another library, or a misspelling of one of these.
    """
    name = name.replace("-", "_")
    keys = config_keys()
    if name in keys:
        return [name]
    if found := _keys_for("", name):
        return found
    last_parts = {key.rpartition(".")[2] for key in keys}
    near = nearest(name, [*keys, *sorted(last_parts), *sorted({synonym for synonym, _ in _PAIRS})], cutoff=0.75)
    return suggest_keys(near[0]) if near else []
