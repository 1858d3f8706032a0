"""What watches a run while it trains: whether it goes on, who is slow, whether copies are equal.

`guards` is the section of a config that sets them; none of them changes a number.
"""
