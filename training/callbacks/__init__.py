"""Callbacks: actions around the steps of a run.

`callback` defines the events and the view of the run, `monitoring` has examples, `conductor` calls the callbacks and
performs their requests in all processes after the same step, and `callback_catalog` lists the names for configs.
"""
