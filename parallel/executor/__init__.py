"""Runs the timetable of a pipeline on devices: every stage runs the same program, tick by tick.

In: the parts of a model (`blocks/model_parts.py`) and a `Timetable`. Out: the loss and gradients of one device.
Read first: `pipeline_loss`, the order of a tick; then `stage`, its parts, and `tick`, which skips them.
"""
