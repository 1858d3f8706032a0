"""One run of a config, from its directory to its report.

`train` shows the order, `training_run` the steps, and `run_context` the work around them. `build_run` creates the run;
`explain` and `verify` examine it without training. The checks: `model_check`, `machine_check` (memory and directory),
`process_check`. `ownership`, `run_directory` and `provenance` are about the run directory, `guards/` watches the
training, and `loading/` loads a run.
"""
