"""Optimizers: from the section `optimizer` to one optax transformation of all parameters.

Read first: `optimizer_config`, the options, then `optimizers`, which puts a direction (`directions`), decay and a
learning rate together, for each group of parameters (`groups`, by `parameter_kinds`). Beside them: `learning_rates`,
`plateau` (a rate that follows the loss), `skipping` (updates that are left out) and `averaging` (EMA).
"""
