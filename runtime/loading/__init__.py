"""Loads a run that has trained, or is still training: evaluate, predict, generate, export.

load            `load_run`: a run, its model and its parameters, on any mesh
loaded_run      the result: params, evaluate, predict, generate, export
find_run        the run that an argument of the command line names
fitting         its strategy on the available devices
rows_file       rows written as one .npz, batch by batch

Nothing here writes into the run directory or claims it: the run may continue meanwhile.
"""
