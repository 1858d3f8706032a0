"""The runtime's models and AdamW in plain JAX and NumPy: loops, whole scores, every expert; nothing of spmdkit."""

from . import lora, mixture, mlp, transformer
from .adamw import AdamW, clip

__all__ = ["AdamW", "clip", "lora", "mixture", "mlp", "transformer"]
