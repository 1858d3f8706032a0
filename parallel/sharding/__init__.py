"""From the strategy of a config to the resolved plan of a run.

In: a model, `strategy:` and `layouts.rules`. Out: a `ShardingPlan`. Read first: `strategies`, what all of them have;
then `lay_out`. What does not go together is in `cannot_combine`.
"""
