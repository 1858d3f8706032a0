"""Compares a step with one device, reports the first difference, and finds its cause.

Input: a step (or a model and a strategy) and batches. Output: a `Verification` (`result`) with every error, the first
difference and its likely cause, the proved properties, and those that were not checked.
Read `compare` first, then `reference` (the one device) and `diagnosis` (causes).
"""
