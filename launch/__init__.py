"""The command line, and the places where a run is launched.

cli places                            the commands; the places
local                                 one file for each place
commands/                             one file for each command: its words and arguments
run/                                  one run of a config, from its folder to its report
supervision/                          processes under way: watched, stopped together, started again
remote/                               hosts over SSH, and their processes
diagnosis/                            `spmdkit doctor`: what a process finds here, and what is wrong
pods/                                 manifests of Kubernetes
drawing/                              pipeline schedules in characters and as SVG
"""
