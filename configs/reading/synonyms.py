"""What other libraries call the keys of a config: the key that is meant, for the error about an unknown one."""

from ...mesh.axes import AXES
from ...mesh.axes import SYNONYMS as OF_AXES

OF_KEYS = {
    "optimizer.learning_rate": ("lr", "learningrate", "max_lr", "peak_lr", "base_lr", "step_size"),
    "optimizer.weight_decay": ("wd", "decay", "l2"),
    "optimizer.betas": ("beta", "beta1", "beta2", "b1", "b2", "adam_betas"),
    "optimizer.epsilon": ("eps", "adam_eps", "adam_epsilon"),
    "optimizer.name": ("optim", "optimiser", "optimizer_name", "optimizer_type"),
    "optimizer.schedule": ("scheduler", "lr_scheduler", "lr_schedule", "warmup", "warmup_steps", "warmup_ratio"),
    "train.global_batch": ("batch_size", "batch", "bs", "batchsize", "global_batch_size", "train_batch_size"),
    "train.accumulate": (
        *("gradient_accumulation_steps", "grad_accumulation", "accumulation", "accumulation_steps", "accumulate_steps"),
        *("grad_accum", "micro_batches", "accumulate_grad_batches"),
    ),
    "train.steps": (
        *(
            "epochs",
            "num_epochs",
            "max_epochs",
            "n_epochs",
            "num_steps",
            "max_steps",
            "iterations",
            "iters",
            "max_iters",
        ),
        *("total_steps", "num_train_steps", "train_steps"),
    ),
    "train.clip_norm": ("grad_clip", "gradient_clipping", "clip", "clip_grad", "max_grad_norm", "clip_grad_norm"),
    "train.remat": (
        "checkpointing",
        "gradient_checkpointing",
        "activation_checkpointing",
        "recompute",
        "grad_checkpoint",
    ),
    "precision.compute": ("dtype", "mixed_precision", "bf16", "fp16", "amp", "compute_dtype", "half"),
    "precision.params": ("param_dtype", "params_dtype"),
    "precision.reduce": ("reduce_dtype", "grad_dtype"),
    "data.length": (
        "seq_len",
        "seq_length",
        "sequence_length",
        "context_length",
        "max_seq_len",
        "block_size",
        "ctx_len",
    ),
    "data.files": ("path", "paths", "data_path", "train_files", "dataset", "data_dir", "train_data"),
    "data.eval_files": ("val_files", "valid_files", "test_files", "validation_files", "eval_data"),
    "data.threads": ("num_workers", "workers"),
    "model.width": ("d_model", "hidden_size", "hidden_dim", "n_embd", "dim", "embed_dim", "hidden"),
    "model.layers": ("n_layers", "num_layers", "n_layer", "depth", "num_hidden_layers", "num_blocks"),
    "model.heads": ("n_heads", "num_heads", "n_head", "num_attention_heads"),
    "model.kv_heads": ("n_kv_heads", "num_kv_heads", "num_key_value_heads"),
    "model.mlp_width": ("d_ff", "ffn_dim", "intermediate_size", "mlp_dim", "ff_dim"),
    "model.vocabulary": ("vocab", "vocab_size", "n_vocab"),
    "run.dir": ("output_dir", "out_dir", "save_dir", "workdir", "logdir", "log_dir", "output"),
    "run.seed": ("random_seed", "rng_seed", "prng_seed"),
    "run.simulate": ("devices", "num_devices", "n_devices", "ngpus", "num_gpus"),
    "run.log_every": ("log_interval", "logging_steps", "log_every_n_steps", "log_steps"),
    "eval.every": ("eval_interval", "eval_steps", "val_interval", "evaluate_every"),
    "checkpoint.every": ("save_every", "save_steps", "save_interval", "ckpt_every", "checkpoint_every"),
    "checkpoint.keep": ("save_total_limit", "max_to_keep", "keep_last"),
    "strategy.data.zero": ("zero", "zero1", "zero2", "zero_stage"),
    "strategy.data.compress": ("compression", "quantize"),
    "strategy.data.local_steps": ("diloco", "local_sgd", "sync_every"),
    "strategy.fsdp.floor_bytes": ("min_num_params", "min_size", "min_weight_size"),
    "strategy.fsdp.keep": ("reshard", "reshard_after_forward"),
    "strategy.pipe.virtual": ("virtual_stages", "num_virtual_stages", "num_chunks", "chunks"),
    "strategy.pipe.microbatches": ("num_microbatches", "n_microbatches"),
}
"""Key -> names that others give it, in small letters; those of the axes stand in mesh/axes.py."""
SIZES = ("degree", "devices", "num_devices", "world_size", "num_stages", "stages", "ways", "n")
"""What others call the size of an axis, in the options of its strategy: `pipe: {stages: 4}`."""

REMARKS = {
    ("epochs", "num_epochs", "max_epochs", "n_epochs"): (
        "It counts optimizer steps; an epoch is the number of training examples / train.global_batch of them."
    ),
    ("batch_size", "batch", "bs", "batchsize", "train_batch_size"): (
        "It counts the rows of a step over all devices and microbatches."
    ),
    ("scheduler", "lr_scheduler", "lr_schedule", "warmup", "warmup_steps", "warmup_ratio"): (
        "It is a mapping: {name: warmup_cosine, warmup_steps: 100}."
    ),
    ("zero", "zero_stage"): "It is 1 or 2; ZeRO-3 is strategy.fsdp.",
    ("bf16", "fp16", "amp", "half", "mixed_precision"): "It is a dtype: bfloat16.",
    ("devices", "num_devices", "n_devices", "ngpus", "num_gpus"): (
        "It is the number of simulated CPU devices; the machine's own are all used where it is left out."
    ),
}
"""Names that others give -> what has to be known besides the key, where its value is not theirs."""
_REMARKS = {name: words for names, words in REMARKS.items() for name in names}
_MEANT: dict[str, list[str]] = {name: [f"strategy.{axis}"] for name, axis in OF_AXES.items()}
for _key, _names in OF_KEYS.items():
    for _name in _names:
        _MEANT.setdefault(_name, []).insert(0, _key)


def meant_by(path: str) -> str | None:
    """Returns the key that an unknown key stands for elsewhere; None where it is no known synonym.

    Args:
        path: The unknown dotted key, such as `strategy.dp`, `train.lr` or `lr`. A key of the section in which it stands
            goes before others; an axis is only meant in `strategy`.
    """
    section, _, name = path.rpartition(".")
    name = name.lower()
    axis = section.removeprefix("strategy.")
    if axis in AXES and section != axis and (name in (axis, *SIZES) or OF_AXES.get(name) == axis):
        return f"{section}.size"
    keys = _MEANT.get(name, [])
    own = [key for key in keys if key.startswith(f"{section}.")]
    others = [key for key in keys if section != "strategy" and not (section and key.startswith("strategy."))]
    return next(iter([*own, *others]), None)


def remark(name: str) -> str:
    """Returns, after a space, what has to be known of the key that a name stands for; otherwise an empty text.

    Args:
        name: A synonym, as typed: `epochs`, `train.epochs`, `--epochs`.
    """
    words = _REMARKS.get(name.rpartition(".")[2].lstrip("-").replace("-", "_").lower())
    return f" {words}" if words else ""


def known_synonyms() -> list[str]:
    """Returns every name that others give to a key or an axis."""
    return sorted(_MEANT)
