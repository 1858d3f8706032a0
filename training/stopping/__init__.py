"""Signals: `interrupts` before a run can save, `gate` while it trains."""
