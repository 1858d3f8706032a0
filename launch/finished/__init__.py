"""What one does with a run that has trained, or still trains: load it, evaluate it, predict, generate, export.

load            `load_run`: a run, its model and its parameters, on any mesh
loaded_run      what it gives: params, evaluate, predict, generate, export
place           which run an argument of the command line means
agreed          which of its checkpoints several processes load
extent          how many rows an evaluation takes, and those in the log took
fitting         its strategy on the devices that there are
parameters      those of a checkpoint, read onto their layouts: no more of a checkpoint is read
rows_file       rows written as one .npz, batch by batch

Nothing here writes into the folder of a run, and nothing takes it: the run may go on meanwhile.
"""
