"""What happens around the step: the loop, optimizers, checkpoints, metrics, and the report of a run.

Read in this order: `loop` (steps back to back, metrics read late), `optimizers` and `learning_rates`, `checkpoints`,
`metrics`, `display`, `exits` and `worker` (how a process ends well or badly), `report` (with `charts`, `drawings` and
`page`). Callbacks have a room of their own, `callbacks/`. How a run is put together from them is in
`launch/run/train.py`. Names are imported from the modules themselves, so that a command that needs one of them does not
wait for the rest.
"""
