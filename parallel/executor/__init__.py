"""Runs the timetable of a pipeline on devices.

In: a model's blocks and a `Timetable`. Out: loss and gradients of a step's rows. Read first: `tick`, then `run`.
`stage` shares the tests of `run`, which runs its parts in every schedule.
"""
