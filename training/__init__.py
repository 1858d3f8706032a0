"""The training loop and everything around the step.

Read `loop` first (steps back to back), then the subpackages: `steps/` (metrics read late, and whether they are finite),
`optimizing/` (optimizers and their learning rates), `callbacks/`, and `stopping/` (signals, and stops at one step in
all processes). `predict` predicts rows; `trainer` puts everything together for Python, with data of any form.
`metrics` and `times` are what a run records; `display` is what it shows. runtime/train.py puts a run together.
Names are imported from the modules themselves, so that a command that needs one of them does not wait for the rest.
"""
