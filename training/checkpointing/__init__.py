"""Checkpoints: `checkpoints` saves and restores, `folder` says which steps are whole, `checksums` whether the bits are.

Behind it, `reading` reads one as the state of a run, `newest` finds the one that all processes can read, `retention`
lets the old ones go, and `quiet` leaves to one message what else would be printed of a failure. `errors` are what can
be wrong with a step, and whose fault it is.
"""
