"""From the strategy of a config to the resolved plan of a run.

In: a model, `strategy:` and `layouts.rules`. Out: a `ShardingPlan`. Read first: `strategies`, their common
interface; then `lay_out`. Invalid combinations are in `conflicts`.
"""
