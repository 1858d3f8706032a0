"""Starts the processes of a run, watches them, stops them together, and starts them again.

Input: command lines with their environments. Output: the end of each process, the cause, and an exit code.
Read first: `attempts` (restarts), then `workers` (one attempt), `blame` (the cause of its end), and `output` (logs).
"""
