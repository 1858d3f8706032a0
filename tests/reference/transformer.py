"""The transformer, written plainly, with the dims and parameters of the runtime's, in their dtype."""

import math
import zlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def differentiate(config, params, batch, key=None, *, loss=None):
    """((sum of the weighted losses, sum of the weights), gradients of the first); `key` None is evaluation."""
    own = partial((loss or globals()["loss"]), config, batch=batch, key=key)
    return jax.value_and_grad(own, has_aux=True)(params)


def loss(config, params, batch, key=None):
    """(sum of weight * loss, sum of weights), two scalars."""
    x = run_blocks(config, params, batch, key, block)
    return next_token_loss(config, params, x, batch)


def logits(config, params, batch, *, block=None):
    """(B, L, V), without dropout."""
    return scores(config, params, run_blocks(config, params, batch, None, block or globals()["block"]))


def run_blocks(config, params, batch, key, block):
    """The residual stream behind the last block, (B, L, D); `block(config, params, x, batch, key)` is one of them."""
    x = jnp.asarray(params["embed"]["tokens"])[batch["inputs"]]
    if config.positions == "learned":
        x = x + jnp.asarray(params["embed"]["positions"])[positions_of(batch, x.shape[1])]
    x = drop(config, x, batch, key, "embed")
    for n in range(config.layers):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params["blocks"])
        x = block(config, own, x, batch, None if key is None else jax.random.fold_in(key, n))
    return x


def scores(config, params, x):
    """Logits of every position."""
    normed = norm(config, x, params["head"])
    return normed @ (params["embed"]["tokens"].T if config.tied else params["head"]["logits"])


def next_token_loss(config, params, x, batch):
    """The weighted cross-entropy, as sums; compiled in one, as blocks are."""
    outside = {name: params[name] for name in ("embed", "head")}
    return _next_token_loss(config, outside, x, batch["targets"], batch["weights"])


@partial(jax.jit, static_argnums=0)
def _next_token_loss(config, params, x, targets, weights):
    return cross_entropy(scores(config, params, x), targets, weights)


def cross_entropy(logits, targets, weights):
    """-log(exp(logit of the target) / sum(exp(logits))), times the weights: (sum, sum of weights)."""
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    log_probability = shifted - jnp.log(jnp.exp(shifted).sum(axis=-1, keepdims=True))
    of_target = (log_probability * jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)).sum(axis=-1)
    weights = jnp.asarray(weights, logits.dtype)
    return -(of_target * weights).sum(), weights.sum()


def block(config, params, x, batch, key):
    """Attention, then the MLP, each added to the residual stream; compiled once for all blocks alike."""
    return _block(what_a_block_reads(config), params, x, beside_tokens(batch), key)


def what_a_block_reads(config):
    """The config without what its blocks do not know."""
    return replace(config, vocabulary=0, length=0, layers=1, tied=False, scan_unroll=1)


def beside_tokens(batch):
    """What blocks read of a batch."""
    return {name: batch[name] for name in ("segments", "positions", "example") if name in batch}


@partial(jax.jit, static_argnums=0)
def _block(config, params, x, batch, key):
    x = x + drop(config, attention_half(config, params["attention"], x, batch), batch, key, "attention")
    normed, inner = norm(config, x, params["mlp"]), swiglu if config.mlp == "swiglu" else gelu
    return x + drop(config, inner(params["mlp"], normed), batch, key, "mlp")


def attention_half(config, params, x, batch):
    """What the attention of one block adds, from all its heads."""
    mixed, size = [], config.head_width or config.width // config.heads
    normed, position = norm(config, x, params), positions_of(batch, x.shape[1])
    for head in range(config.heads):
        group = head // (config.heads // (config.kv_heads or config.heads))
        own, shared = (slice(each * size, (each + 1) * size) for each in (head, group))
        query, key = biased(params, "query", normed, own), biased(params, "key", normed, shared)
        if config.head_norm:
            query = rms_norm(query, params["query_norm"], config.norm_epsilon)
            key = rms_norm(key, params["key_norm"], config.norm_epsilon)
        if config.positions == "rotary":
            query, key = rotate(query, position, config), rotate(key, position, config)
        mixed.append(attention(query, key, biased(params, "value", normed, shared), batch.get("segments")))
    return biased(params, "out", jnp.concatenate(mixed, axis=-1))


def positions_of(batch, length):
    """(B, L), or (1, L): where each token stands in its document."""
    return batch.get("positions", np.arange(length)[None])


def biased(params, name, x, columns=slice(None)):
    """x times some columns of a matrix, and the bias where there is one."""
    product = x @ params[name][:, columns]
    bias = params.get(f"{name}_bias")
    return product if bias is None else product + jnp.asarray(bias)[None, None, columns]


def attention(query, key, value, segments=None):
    """One head: (B, L, K) each; a position sees itself and those before it, of its own document."""
    length = query.shape[1]
    score = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[2])
    visible = jnp.arange(length)[None, :, None] >= jnp.arange(length)[None, None, :]
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    return softmax(jnp.where(visible, score, -jnp.inf)) @ value


def softmax(score):
    """Over the last dim."""
    power = jnp.exp(score - jax.lax.stop_gradient(score.max(axis=-1, keepdims=True)))
    return power / power.sum(axis=-1, keepdims=True)


def rotate(x, position, config):
    """(B, L, K): turns the pair (k, k + K/2) by position * frequency(k); `position` is (B, L) or (1, L)."""
    half = x.shape[2] // 2
    frequencies = [frequency(config, k, half) for k in range(half)]
    angle = jnp.asarray(position)[:, :, None] * jnp.asarray(frequencies, x.dtype)[None, None]
    first, second = x[:, :, :half], x[:, :, half:]
    turned = first * jnp.cos(angle) - second * jnp.sin(angle), first * jnp.sin(angle) + second * jnp.cos(angle)
    return jnp.concatenate(turned, axis=-1)


def frequency(config, k, half):
    """base ** (-2k / K), and as Llama 3 slows it: by the length of its wave against the length first trained on."""
    plain = config.rope_base ** (-k / half)
    if not config.rope_trained_length:
        return plain / config.rope_factor
    wave = 2 * math.pi / plain
    if wave < config.rope_trained_length / config.rope_fast_turns:
        return plain
    if wave > config.rope_trained_length / config.rope_slow_turns:
        return plain / config.rope_factor
    smooth = config.rope_trained_length / wave - config.rope_slow_turns
    smooth /= config.rope_fast_turns - config.rope_slow_turns
    return (1 - smooth) * plain / config.rope_factor + smooth * plain


def norm(config, x, params):
    """The norm in front of something, with its own scale and bias."""
    if config.norm == "rms":
        return rms_norm(x, params["norm"], config.norm_epsilon)
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + config.norm_epsilon)
    scale, bias = (jnp.asarray(params[name])[None, None, :] for name in ("norm", "norm_bias"))
    return centred / deviation * scale + bias


def rms_norm(x, scale, epsilon):
    """x divided by the root of its mean square over the last dim, times the scale."""
    return x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * jnp.asarray(scale)[None, None, :]


def swiglu(params, x):
    """(silu(x gate) * (x up)) down."""
    gate = biased(params, "gate", x)
    return biased(params, "down", gate / (1 + jnp.exp(-gate)) * biased(params, "up", x))


def gelu(params, x):
    """gelu(x up) down, as GPT-2 has it."""
    up = biased(params, "up", x)
    return biased(params, "down", up / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))


def drop(config, x, batch, key, name):
    """Dropout at one place of the model; nothing where there is no key."""
    if key is None or not config.dropout:
        return x
    kept = kept_values(key, name, batch["example"], x.shape, config.dropout)
    return jnp.where(kept, x / (1 - config.dropout), 0.0)


def kept_values(key, name, example, shape, rate):
    """bool (B, L, D). The mask of position l of a row has the key of the two words

    first word of `key` ^ crc32(name of the place) ^ l,  second word of `key` ^ global index of the row.
    """
    first, second = jax.random.key_data(key)

    def of_position(row, position):
        words = first ^ jnp.uint32(zlib.crc32(name.encode())) ^ position, second ^ row
        own = jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")
        return jax.random.uniform(own, shape[2:], jnp.float32) < jnp.float32(1 - rate)

    of_row = jax.vmap(of_position, in_axes=(None, 0))
    positions = jnp.arange(shape[1], dtype=jnp.uint32)
    return jax.vmap(of_row, in_axes=(0, None))(jnp.asarray(example).astype(jnp.uint32), positions)


# First parameters


def init(config, key, *, init_mlp=None):
    """First parameters in NumPy float32, block by block."""
    D, V = config.width, config.vocabulary
    params = {"embed": {"tokens": draw(key, "embed/tokens", (V, D), D**-0.5 if config.tied else 1.0)}}
    params["head"] = init_norm(config)
    if config.positions == "learned":
        rows = config.max_length or config.length
        params["embed"]["positions"] = draw(key, "embed/positions", (rows, D), D**-0.5 if config.tied else 1.0)
    if not config.tied:
        params["head"]["logits"] = draw(key, "head/logits", (D, V), D**-0.5)
    blocks = [_init_block(config, jax.random.fold_in(key, n), init_mlp or _init_mlp) for n in range(config.layers)]
    params["blocks"] = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    return params


def _init_block(config, key, init_mlp):
    D, size = config.width, config.head_width or config.width // config.heads
    H, G = config.heads * size, (config.kv_heads or config.heads) * size
    attention = {
        **init_norm(config),
        "query": draw(key, "attention/query", (D, H), D**-0.5),
        "key": draw(key, "attention/key", (D, G), D**-0.5),
        "value": draw(key, "attention/value", (D, G), D**-0.5),
        "out": draw(key, "attention/out", (H, D), H**-0.5 * residual_scale(config)),
    }
    names = ("query", "key", "value", "out")
    for name in {"none": (), "inputs": names[:3], "all": names}[config.attention_bias]:
        attention[f"{name}_bias"] = np.zeros(attention[name].shape[1], np.float32)
    if config.head_norm:
        attention |= {name: np.ones(size, np.float32) for name in ("query_norm", "key_norm")}
    return {"attention": attention, "mlp": init_mlp(config, key)}


def init_norm(config):
    """Scales of 1, and of a LayerNorm biases of 0."""
    scale = {"norm": np.ones(config.width, np.float32)}
    return scale if config.norm == "rms" else {**scale, "norm_bias": np.zeros(config.width, np.float32)}


def _init_mlp(config, key):
    D, F = config.width, mlp_width(config)
    inward = ("gate", "up") if config.mlp == "swiglu" else ("up",)
    mlp = {**init_norm(config), **{name: draw(key, f"mlp/{name}", (D, F), D**-0.5) for name in inward}}
    mlp["down"] = draw(key, "mlp/down", (F, D), F**-0.5 * residual_scale(config))
    if config.mlp_bias:
        mlp |= {f"{name}_bias": np.zeros(mlp[name].shape[1], np.float32) for name in (*inward, "down")}
    return mlp


def mlp_width(config):
    """As given, or 4 times the width with GELU, or 8/3 of it, rounded up to a multiple of 64."""
    if config.mlp == "gelu":
        return config.mlp_width or 4 * config.width
    return config.mlp_width or math.ceil(8 * config.width / 3 / 64) * 64


def residual_scale(config):
    """Two matrices of each block end on the residual stream."""
    return (2 * config.layers) ** -0.5


def draw(key, name, shape, std):
    """Normal numbers cut off at two deviations, scaled to `std`; the key is folded with crc32 of the name."""
    return np.asarray(_draw(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, std))


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key, shape, std):
    density, inside = math.exp(-2) / math.sqrt(2 * math.pi), math.erf(math.sqrt(2))
    numbers = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return numbers * jnp.float32(std / math.sqrt(1 - 4 * density / inside))
