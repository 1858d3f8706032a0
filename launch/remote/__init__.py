"""Processes on other hosts over SSH.

hosts          the hosts file
preflight      asks every host, before a run starts, if it has what the run needs; builds the command line of ssh
client         stands for one remote process on this machine
agent          owns that process on its host; its text is sent over ssh
"""
