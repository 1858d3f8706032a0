"""Callbacks: what happens around the steps of a run beside training itself, one file each.

What comes in: the events of a run (`callback.Callback` lists them), with a `run.Run` that says where the run is. What
goes out: files, and requests (`asks.Asks`) to stop, to evaluate, to save, to change the learning rate, which all
processes carry out after the same step. Read `callback`, `early_stopping` as an example, then `conductor`, which calls
them. `catalog` lists those that a config can name; those that give figures to other libraries stand in `trackers/`.

`run` shares the tests of `conductor`.
"""
