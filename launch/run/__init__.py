"""One run of a config, from its folder to its report.

`train` shows all of it in order, `under_way` its steps, `pauses` what happens between them; `build` makes the run,
`explain` and `verify` look at it without training. `directory/` is about what a run leaves and finds on disk,
`guarding/` about what is checked before and while it trains.

`pauses` shares the tests of `under_way`; `reduce` shares the tests of `verify`.
"""
