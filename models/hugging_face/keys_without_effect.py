"""Keys of config.json that do not change the logits, and that the transformer therefore does not read.

Every other key is read or compared, or an error names it: a key that is accepted and not used could change the numbers
of the model without a message.

Source: the attributes of `PretrainedConfig`, `LlamaConfig`, `Qwen2Config`, `Qwen3Config`, `GPT2Config` and
`GenerationConfig` in `transformers` 4.57 and 5.24, and what their models read of them.
"""

import re

DESCRIPTION = (
    r"_\w*",
    "architectures",
    "finetuning_task",
    "is_llama_config",
    "model_type",
    "name_or_path",
    "task_specific_params",
    r"tokenizer_\w+",
    r"transformers\.\w+",
    "transformers_version",
    r"unsloth_\w+",
)
"""The file itself: its origin, and the programs that wrote it. The arrays show if it is another architecture."""

DTYPE = ("dtype", "torch_dtype", "use_bfloat16")
"""The dtype in which `transformers` loads the arrays: here they keep the dtype of the files."""

TOKENS = (r"\w+_token_id", "prefix", "model_max_length", "max_sequence_length", "n_ctx")
"""Special tokens and limits of a tokenizer."""

TRAINING = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "gradient_checkpointing",
    "initializer_range",
    "resid_pdrop",
)
"""Training: dropout is `model.dropout`, and initial values are drawn as for any transformer."""

IMPLEMENTATION = (
    "attn_implementation",
    "cache_implementation",
    "chunk_size_feed_forward",
    "experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pretraining_tp",
    "reorder_and_upcast_attn",
    "return_dict",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "torchscript",
    "use_cache",
    "xla_device",
)
"""The program that computes the logits, up to rounding, and what it returns beside them."""

OTHER_HEADS = (
    "classifier_dropout",
    "cross_attention_hidden_size",
    "id2label",
    "is_decoder",
    "label2id",
    "num_labels",
    "predict_special_tokens",
    "problem_type",
    r"summary_\w+",
)
"""Heads that are not a language model's."""

GENERATION = (
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)
"""Defaults of `generate`."""

_PATTERN = re.compile(
    "|".join((*DESCRIPTION, *DTYPE, *TOKENS, *TRAINING, *IMPLEMENTATION, *OTHER_HEADS, *GENERATION)), re.ASCII
)


def has_no_effect(key: str) -> bool:
    """Returns True for a key of config.json that does not change the logits of any supported family."""
    return _PATTERN.fullmatch(key) is not None
