"""Checkpoints: `checkpoints` saves and restores, `folder` says which steps are whole, `checksums` whether the bits are.

`errors` are what can be wrong with a step, and whose fault it is.
"""
