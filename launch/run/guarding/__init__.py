"""Checks of a run: before it begins (`limits`, `model_check`, `memory`, `agreement`), and as it trains (the rest)."""
