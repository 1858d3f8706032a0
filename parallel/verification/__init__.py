"""Does a step compute what one device computes? Compares the two, names the first difference, and looks for its cause.

In: a step (or a model and a strategy) and batches. Out: a `Verification` (`result`): every error, the first difference
with its likely cause, what is proved and what was not looked at.
Read first: `compare` (what is compared), `reference` (the one device), then `diagnosis` (causes, by measuring).
`sums` shares the tests of `reference`, which adds them up.
"""
