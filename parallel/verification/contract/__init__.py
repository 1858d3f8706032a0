"""Does a model do what the runtime relies on: do its sums add up, are its rows independent, does padding weigh nothing?

In: a model and a few rows. Out: the `Breach`es, each with what was measured and how to mend it. Read first: `breaches`
(what is checked), then `probe` (how it is measured), `words` (how it is told), `check` (the call).
"""
