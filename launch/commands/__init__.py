"""One file for each command of the command line: its words, its arguments, what it calls."""
