"""Hosts that are reached over SSH: which they are, whether they can take part, and their processes.

hosts          the hosts file, checked as a config is
connection     the command line of ssh, and what its errors mean
preflight      every host is asked, at once, before anything starts
client         a script here, one for each process there: signals go through it, and how the process ended
agent          a script sent there, one for each process: starts it, relays it, kills it when the connection is gone

`agent` and `client` import the standard library alone: the one runs where spmdkit may be missing, both start at once.
"""
