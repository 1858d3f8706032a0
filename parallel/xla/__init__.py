"""What is there because of what a compiler, a backend or a version of JAX does; nothing else is.

In: arrays, traced functions, compiled text. Out: the same numbers, made in another order or way; counts; names.
Read first: `platform`, which tricks are on where, and what each gained.
"""
