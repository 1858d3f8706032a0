"""The compiled step.

In: a model, an optimizer, a `ShardingPlan`. Out: (state, batch) -> (state, metrics). Read first: `train_step`.
"""
