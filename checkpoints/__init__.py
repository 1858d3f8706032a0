"""Saves, restores, inspects, verifies and exports checkpoints; start with manager.py, then restore.py.

In: a directory, and the abstract state of a run. Out: the state on the layouts of the current mesh, or arrays of the
host. Orbax writes and reads the arrays; this package adds checksums over every byte that a resume reads.
"""
