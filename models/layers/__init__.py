"""The parts that models are put together from: small functions of arrays, each its own idea.

In: what one device holds. Out: what it computes; no collective is called here. Read first: `attention`, then `norms`.
"""
