"""How a process of a run ends: asked to (`interrupts`, `stopping`), or with an error and its cause (`exits`).

`known_causes` and `lost_peers` know the errors of Python, JAX and the machine that stand for something else.
"""
