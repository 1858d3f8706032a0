"""Running a stack of blocks: gather its parameters, run it, drop them.

In: a model's blocks and the layouts of their parameters. Out: the loss of a device's rows. Read first: `forward`.
"""
