"""Checks of a run: before it begins (`model_check`, `memory`, `agreement`), and while it trains (the two others)."""
