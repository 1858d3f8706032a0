"""The families as their papers and config files describe them, in NumPy float64, without the runtime's models."""

import json
import math

import numpy as np

LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    **LLAMA,
    "head_dim": 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 32,
    },
}
BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 90.0}}
del QWEN3["rope_theta"]
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 37,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "activation_function": "gelu_new",
}
FAMILIES = {"llama": LLAMA, "llama3": LLAMA3, "biased": BIASED, "qwen2": QWEN2, "qwen3": QWEN3, "gpt2": GPT2}


def draw(config, dtype="float32", seed=0):
    """Arrays by name, every one away from what a fresh model has."""
    random = np.random.default_rng(seed)
    shapes = gpt2_shapes(config) if config["model_type"] == "gpt2" else llama_shapes(config)
    return {
        name: (random.normal(size=shape) * 0.3 + (1.0 if "norm" in name or "ln_" in name else 0.0)).astype(dtype)
        for name, shape in shapes.items()
    }


def llama_shapes(config):
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = head_size(config)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    out, kv = heads * size, config["num_key_value_heads"] * size
    linear = {"q_proj": (out, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, out)}
    linear = {f"self_attn.{name}": shape for name, shape in linear.items()}
    linear |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        for name, shape in linear.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if has_bias(config, name):
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (width,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (size,) for name in "qk"}
    return shapes


def has_bias(config, name):
    if config["model_type"] == "qwen2":
        return name.split(".")[1] in ("q_proj", "k_proj", "v_proj")
    return config.get("mlp_bias" if name.startswith("mlp") else "attention_bias", False)


def head_size(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def gpt2_shapes(config):
    width = config["n_embd"]
    shapes = {"wte.weight": (config["vocab_size"], width), "wpe.weight": (config["n_positions"], width)}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    linear = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    linear |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for n in range(config["n_layer"]):
        for name, shape in linear.items():
            shapes |= {f"h.{n}.{name}.weight": shape, f"h.{n}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{n}.{name}.weight": (width,), f"h.{n}.{name}.bias": (width,)}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def logits(config, arrays, tokens):
    """(rows, positions, vocabulary) in float64."""
    arrays = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    of_row = gpt2_row if config["model_type"] == "gpt2" else llama_row
    return np.stack([of_row(config, arrays, row) for row in tokens])


def llama_row(config, arrays, tokens):
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], head_size(config)
    epsilon, x = config["rms_norm_eps"], arrays["model.embed_tokens.weight"][tokens]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."

        def linear(name, x, layer=layer):
            return x @ arrays[f"{layer}{name}.weight"].T + arrays.get(f"{layer}{name}.bias", 0.0)

        normed = root_mean_square(x, arrays[f"{layer}input_layernorm.weight"], epsilon)
        query = linear("self_attn.q_proj", normed).reshape(len(tokens), heads, size)
        key, value = (linear(f"self_attn.{each}_proj", normed).reshape(len(tokens), groups, size) for each in "kv")
        if config["model_type"] == "qwen3":
            query = root_mean_square(query, arrays[f"{layer}self_attn.q_norm.weight"], epsilon)
            key = root_mean_square(key, arrays[f"{layer}self_attn.k_norm.weight"], epsilon)
        query, key = turned(config, query), turned(config, key)
        mixed = [
            attention(query[:, head], key[:, head // (heads // groups)], value[:, head // (heads // groups)])
            for head in range(heads)
        ]
        x = x + linear("self_attn.o_proj", np.concatenate(mixed, axis=1))
        normed = root_mean_square(x, arrays[f"{layer}post_attention_layernorm.weight"], epsilon)
        gate = linear("mlp.gate_proj", normed)
        x = x + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", normed))
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return root_mean_square(x, arrays["model.norm.weight"], epsilon) @ arrays[head].T


def gpt2_row(config, arrays, tokens):
    arrays = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    heads, x = config["n_head"], arrays["wte.weight"][tokens] + arrays["wpe.weight"][: len(tokens)]
    for n in range(config["n_layer"]):

        def linear(name, x, n=n):
            return x @ arrays[f"h.{n}.{name}.weight"] + arrays[f"h.{n}.{name}.bias"]

        normed = layer_norm(x, arrays[f"h.{n}.ln_1.weight"], arrays[f"h.{n}.ln_1.bias"])
        query, key, value = np.split(linear("attn.c_attn", normed), 3, axis=1)
        parts = [np.split(each, heads, axis=1) for each in (query, key, value)]
        x = x + linear("attn.c_proj", np.concatenate([attention(*own) for own in zip(*parts, strict=True)], axis=1))
        normed = layer_norm(x, arrays[f"h.{n}.ln_2.weight"], arrays[f"h.{n}.ln_2.bias"])
        inner = linear("mlp.c_fc", normed)
        inner = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear("mlp.c_proj", inner)
    return layer_norm(x, arrays["ln_f.weight"], arrays["ln_f.bias"]) @ arrays["wte.weight"].T


def attention(query, key, value):
    score = query @ key.T / math.sqrt(query.shape[1])
    score[np.triu_indices(len(score), 1)] = -np.inf
    power = np.exp(score - score.max(axis=1, keepdims=True))
    return power / power.sum(axis=1, keepdims=True) @ value


def turned(config, x):
    """Each pair of numbers k and k + half of a head as a complex number, turned by its angle."""
    half = x.shape[2] // 2
    angle = np.outer(np.arange(len(x)), [frequency(config, k / half) for k in range(half)])
    pairs = (x[:, :, :half] + 1j * x[:, :, half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=2)


def frequency(config, part):
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = rope.get("rope_theta", config.get("rope_theta")) ** -part
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        return plain / rope["factor"]
    if kind != "llama3":
        return plain
    wave, length = 2 * math.pi / plain, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wave > length / low:
        return plain / rope["factor"]
    if wave < length / high:
        return plain
    smooth = (length / wave - low) / (high - low)
    return (1 - smooth) * plain / rope["factor"] + smooth * plain


def root_mean_square(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def layer_norm(x, scale, bias):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5) * scale + bias


def write(folder, config, arrays, files=1):
    """A folder as one downloads it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(arrays)
    parts = [names[number::files] for number in range(files)]
    titles = [
        f"model-{n + 1:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors" for n in range(files)
    ]
    for title, part in zip(titles, parts, strict=True):
        (folder / title).write_bytes(file_of({name: arrays[name] for name in part}))
    if files > 1:
        index = {name: title for title, part in zip(titles, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def file_of(arrays):
    """The bytes of a file."""
    codes, data, described = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64"}, b"", {}
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        described[name] = {"dtype": codes[array.dtype.name], "shape": array.shape, "data_offsets": [len(data), end]}
        data += np.ascontiguousarray(array).tobytes()
    header = json.dumps(described).encode()
    return len(header).to_bytes(8, "little") + header + data
