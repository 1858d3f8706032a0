"""`spmdkit sweep`: one run for each combination of values; all are checked before the first one trains.

sweep          the whole command, top to bottom
combinations   from `key=V1,V2` words to combinations with names; plain text alone
planning       from combinations to configs and folders; no device is opened
look           in a process of its own: what one run would hold and send, or why it cannot be
training       one run in its process, from its start or its checkpoint to its end
telling        the table, the JSON object and the page
"""
