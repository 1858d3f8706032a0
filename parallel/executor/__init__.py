"""Runs the timetable of a pipeline on devices: every stage the same program, tick by tick.

In: the parts of a model (`blocks/model_parts.py`) and a `Timetable`. Out: a device's loss and gradients of a step.
Read first: `run`, the order of a tick; then `stage`, its parts. `message` is what stages send, `tick` what they skip.
`stage` shares the tests of `run`, which runs its parts in every schedule.
"""
