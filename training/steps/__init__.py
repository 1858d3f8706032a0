"""Steps under way: what the loop learns of them, a few steps late, and whether it is finite.

In: the metrics of steps just started. Out: figures of logged steps, and `Diverged`. Read first: `late_log`, then
`not_finite`, which says how many steps in a row may be left out.
"""
