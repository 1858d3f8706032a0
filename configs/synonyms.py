"""What other libraries call the keys of a config: the key that is meant, for the error about an unknown one."""

from ..mesh.axes import SYNONYMS as OF_AXES

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
}
"""Key -> names that others give it, in small letters; those of the axes stand in mesh/axes.py."""
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
    keys = _MEANT.get(name.lower(), [])
    own = [key for key in keys if key.startswith(f"{section}.")]
    others = [key for key in keys if section != "strategy" and not (section and key.startswith("strategy."))]
    return next(iter([*own, *others]), None)
