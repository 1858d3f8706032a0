"""What the runtime's models compute, written plainly: no custom gradient, recomputation, dispatch or split.

Plain `jax.numpy`: a Python loop over blocks and heads, the whole square of scores, every expert for every position;
gradients are JAX's own. The optimizer is NumPy. Nothing of spmdkit is imported: configs are read for their sizes alone.
"""

from . import mixture, mlp, transformer
from .adamw import AdamW, clip

__all__ = ["AdamW", "clip", "mixture", "mlp", "transformer"]
