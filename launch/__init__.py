"""The command line, and the launchers of runs.

cli, commands/                        the command line
console                               its streams and warnings
launchers                             the interface of the launchers, and their list
local, ssh, slurm, mpi, kubernetes    one file for each launcher
remote/                               hosts over SSH and their processes
manifest                              the Kubernetes objects
templates/                            the Kubernetes objects and the batch script of Slurm, for jinja2
supervision/                          starts, watches, stops and restarts processes
doctor/                               `spmdkit doctor`: checks a machine and a job before a run
"""
