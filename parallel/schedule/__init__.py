"""Pipeline schedules as data: the action of each stage at each tick. Host code; no file here imports JAX.

In: S stages, M microbatches, the name of a schedule or a CSV file. Out: a `Schedule`, checked (`schedule_table`) and
timed (`timing`), and a `Timetable` of integers for the executor, with the blocks of each stage (`stages`).
Read first: `schedule_table`, then `builders` (the schedules), then `timetable` (the slots and lifetimes of values).
"""
