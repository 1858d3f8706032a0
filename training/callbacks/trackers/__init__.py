"""Callbacks that give the config and the metrics of a run to a library that tracks runs, one file each.

`optional` says which extra brings the library, where it is not installed. Nothing is sent unless the config says so.
"""
