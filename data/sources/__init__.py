"""The sources of examples: one file for each format, and for each kind of object that is already in memory.

A source gives examples by index (`..source.Source`). `texts`, `columns` and `tokenizer` give documents of token ids,
and `..windows` makes examples from them. Several sources share `source_files`. `..splits` selects one for a config.
"""
