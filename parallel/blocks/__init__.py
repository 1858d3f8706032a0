"""Runs a stack of blocks: gathers a block's parameters, runs it, drops them.

In: a model and the plan of its parameters. Out: the loss of a device's rows as a function of its shards.
Read first: `gathered_block`, one block; then `forward`, the whole stack. `split_backward` is for pipelines and
prefetching.
"""
