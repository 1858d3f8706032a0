"""What is there because of what a compiler or a backend does; nothing else is.

In: arrays and programs. Out: the same numbers, in another order or shape. Each file says what it gains, and where.
"""
