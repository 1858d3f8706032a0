"""The compiled step.

In: a model, an optimizer, a `ShardingPlan`. Out: (state, batch) -> (state, metrics), and the step's collectives
(`cost`). Read first: `composition`, the order of the strategies; then `train_step`.
"""
