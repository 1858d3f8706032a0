"""How programs are compiled: kept between runs, and with which options of XLA.

`cache.py` says where compiled programs are kept, `store.py` keeps them, `sharing.py` has the processes of a run agree
on them, `options.py` and `flags.py` hold what XLA is told, `record.py` what all of it came to. Read `cache.py` first.

`record` shares the tests of `cache`.
"""
