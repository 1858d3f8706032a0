"""What happens around the step: the loop, and a room for each thing that surrounds it.

Read `loop` first (steps back to back), then the rooms: `steps/` (metrics read late, and whether they are finite),
`optimizing/` (optimizers and their learning rates), `checkpointing/`, `callbacks/`, `ending/` (how a process ends well
or badly), `watching/` (what notices a run that goes wrong) and `report/`. `predict` is what a model says of rows,
`trainer` puts everything together for Python, with data of any form (`given_data`). `metrics`, `times` and `goodput`
are what a run writes down; `display` is what it shows. How a run is put together from them is in `launch/run/train.py`.
Names are imported from the modules themselves, so that a command that needs one of them does not wait for the rest.

`rollbacks` shares the tests of `launch/run/rolling_back`.
"""
