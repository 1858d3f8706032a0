"""Predicts what a step will need on devices that are not here, from the program that XLA compiled for them.

Scheduled HLO of a compiled step and its target come in; times, and the communication that nothing hides, go out.
Read `timeline.py` first.
"""
