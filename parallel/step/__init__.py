"""The compiled step.

In: a model, an optimizer, a `ShardingPlan`. Out: (state, batch) -> (state, metrics), and what it moves (`cost`). Read
first: `composition`, which strategy acts when; then `train_step`.
"""
