"""Metrics of running steps, read a few steps late and checked to be finite.

Read `late_log` first, then `not_finite`, which limits consecutive steps that are not finite.
"""
