"""Pipeline schedules as data: who does what for which microbatch, when. Host code.

In: stages, microbatches, a schedule's name or file. Out: a `Timetable`. Read first: `table`.
"""
