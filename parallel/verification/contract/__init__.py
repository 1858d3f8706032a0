"""Does a model do what the runtime relies on?

In: a model and a few rows. Out: the breaches, each with its remedy. Read first: `breaches`.
"""
