"""Code that exists only because of the behavior of a compiler, a backend or a JAX version.

In: arrays, traced functions, compiled text. Out: the same numbers, computed in another order or way; counts; names.
Read first: `platform`, which lists the tricks, their platforms and their measured gains.
"""
