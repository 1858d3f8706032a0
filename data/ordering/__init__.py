"""The order of examples: a function of (seed, sample index), the same for any number of processes.

Read first: `order`, one source in the order of a seed. `mixture` draws from several by their shares (`data/shares.py`);
`buckets` gives batches of one length each.
"""
