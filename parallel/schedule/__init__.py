"""Pipeline schedules as data: which action each stage runs at each tick. Host code; no file here imports JAX.

In: S stages, M microbatches, a schedule's name or CSV file. Out: a `Schedule`, checked (`table`) and timed (`timing`),
and a `Timetable` of integers for the executor, with the blocks of each stage (`stages`).
Read first: `table`, then `builders` (the schedules), then `timetable` (where each value lies in memory, and how long).
"""
