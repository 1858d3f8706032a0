"""Where examples come from: one file for each format, and for each kind of object that is in memory already.

A source gives examples by index (`..source.Source`); `texts/` gives documents of token ids, of which `..windows` makes
examples. `files`, `values` and `bad_records` are what several of them share. `..splits` picks one for a config;
`streams` are those that can only be read from their beginning (`stream_source`).
"""
