"""Attention over positions that are split over devices.

In: this device's queries, keys and values. Out: this device's part of the result. Read first: `online_softmax`.
"""
