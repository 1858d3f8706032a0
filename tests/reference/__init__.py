"""The runtime's models and AdamW in plain JAX and NumPy: loops, whole scores, every expert; nothing of spmdkit."""

from . import mixture, mlp, transformer
from .adamw import AdamW, clip

__all__ = ["AdamW", "clip", "mixture", "mlp", "transformer"]
