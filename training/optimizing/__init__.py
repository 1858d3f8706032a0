"""Parts of an optimizer that its name does not say: which parameters it is for, and what may hold an update up.

In: the section `optimizer`. Out: optax transformations. Read first: `groups`, which parameters have options of their
own. Then `plateau` (a rate that follows the loss), `skipping` (updates that are left out) and `averaging` (EMA).
"""
