"""The report: report.html of a run, the page that compares runs, and drawings of pipeline schedules.

`run_record` reads a run directory, `page` and `comparison` write the pages from their templates, `charts`, `drawings`
and `time_course` prepare what the macros of parts.html draw, and `reporter` is what a run calls.
"""
