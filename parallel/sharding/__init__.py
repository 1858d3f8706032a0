"""From the strategy of a config to the resolved plan of a run.

In: a model, `strategy:` and `layouts.rules`. Out: a `ShardingPlan`. Read first: `lay_out`.
"""
