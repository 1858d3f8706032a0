"""report.html of a run: `report` puts the page together; one file for each part of it, `page` is the frame.

`charts` and `drawings` make SVG and HTML and know of no run.

`page` shares the tests of `report`.
"""
