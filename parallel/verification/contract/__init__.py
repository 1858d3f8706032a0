"""The contract between a model and the runtime: sums add up, rows are independent, padding changes nothing.

Input: a model and a few rows. Output: `Breach`es with their measurements and remedies. Read `breaches` first (the
public function, the checks and their messages), then `probe` and `pairs` (the measurements).
"""
