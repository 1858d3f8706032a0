"""Documents of token ids: where their text or their ids come from, and how they become streams.

Read first: `documents`, what the others give; then `text`, bytes of files. `columns` are those of tables, `tokens` are
ids already, `tokenizer` makes ids of texts, `stdlib` is the data set that is on every machine.
"""
