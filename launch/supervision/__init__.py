"""Processes under way: started, watched, stopped together, and started again.

Comes in: command lines with their environments. Goes out: how each of them ended, who was first, and an exit code.
Read first: `processes`, one attempt from its start to its end, then `workers`, what is done to each process.
"""
