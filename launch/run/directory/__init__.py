"""The directory of a run: whose it is, what it holds of which run, and whether this one may go on in it."""
