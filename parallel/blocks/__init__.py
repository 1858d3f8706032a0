"""Running a stack of blocks: gather a block's parameters, run it, drop them.

In: a model and the plan of its parameters. Out: the loss of a device's rows as a function of its shards.
Read first: `gathered_block`, one block; then `forward`, all of them. `split_backward` is for pipelines and prefetch.
`gathered_block` shares the tests of `forward`; `activations` shares the tests of `read_again`.
`read_again` tells the cost of a step what backward gathers twice.
"""
