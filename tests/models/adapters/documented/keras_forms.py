"""Keras: a CNN in sequence, a transformer of layers of one's own, a recurrent network in two directions, a subclass."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp
import keras
from keras import layers, ops


class TransformerBlock(layers.Layer):
    """Attention and two dense layers, each with dropout and a norm after."""

    def __init__(self, width, heads, hidden, rate=0.0):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
        self.ffn = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1, self.dropout2 = layers.Dropout(rate), layers.Dropout(rate)

    def call(self, inputs):
        out = self.layernorm1(inputs + self.dropout1(self.att(inputs, inputs)))
        return self.layernorm2(out + self.dropout2(self.ffn(out)))


class TokenAndPositionEmbedding(layers.Layer):
    """Two embeddings, added."""

    def __init__(self, length, vocabulary, width):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocabulary, output_dim=width)
        self.pos_emb = layers.Embedding(input_dim=length, output_dim=width)

    def call(self, x):
        return self.token_emb(x) + self.pos_emb(ops.arange(start=0, stop=ops.shape(x)[-1], step=1))


def text_transformer():
    """Classifies a text by the mean of its tokens."""
    inputs = layers.Input(shape=(12,))
    x = TokenAndPositionEmbedding(12, 16, 8)(inputs)
    x = TransformerBlock(8, 2, 16)(x)
    x = layers.Dropout(0.0)(layers.GlobalAveragePooling1D()(x))
    x = layers.Dense(8, activation="relu")(x)
    return keras.Model(inputs=inputs, outputs=layers.Dense(2, activation="softmax")(x))


class Subclassed(keras.Model):
    """Layers as attributes, a flag for training, and what is built on its first call."""

    def __init__(self):
        super().__init__()
        self.dense1 = layers.Dense(16, activation="relu")
        self.dropout = layers.Dropout(0.0)
        self.dense2 = layers.Dense(8, activation="softmax")

    def call(self, inputs, training=False):
        x = self.dense1(ops.reshape(inputs, (-1, 64)))
        return self.dense2(self.dropout(x, training=training))


def subclassed():
    """Not built yet."""
    return Subclassed()


def negative_log_likelihood(probabilities, batch):
    """Of probabilities."""
    return -jnp.log(jnp.take_along_axis(probabilities, batch["targets"][:, None], axis=1)[:, 0])
