"""Which example each sample of a run is: a function of (seed, sample index), whatever the number of processes.

Read first: `order`, one source in the order of a seed. `mixture` draws from several, each with its share (`shares`);
`buckets` gives batches of one length each.
"""
