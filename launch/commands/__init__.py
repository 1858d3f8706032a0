"""One file for each command of the command line: its words, its arguments, what it calls.

`doctor` shares the tests of `launch/diagnosis/doctor`; `explain` shares the tests of `launch/run/explain`; `launch`
shares the tests of `launch/cli`; `schedule` shares the tests of `launch/drawing/schedule`; `train` shares the tests
of `launch/run/train`; `verify` shares the tests of `launch/run/verify`.
"""
