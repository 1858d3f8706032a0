"""How a process finds the others of its run, and meets them before JAX starts.

addresses                             "host:port", loopback, which interface the coordinator listens on
hostlists                             Slurm's "n[1-4,7]", written out
facts                                 what one source says, and how it is read from variables
sources                               what each launcher's variables say, one function each; the table SOURCES
detection                             one job from all of them, or what is missing or contradicts
accelerators                          which of a host's GPUs are this process's
proxies                               no proxy stands between the processes of a run
rendezvous                            they meet at the coordinator's address: who is missing, who is foreign
host, guest                           the two sides of it: rank 0, all others
meeting                               what both speak of
protocol                              the lines that they send each other there

`accelerators` shares the tests of `detection`; `host` shares the tests of `rendezvous`; `guest` shares the tests of
`rendezvous`; `meeting` shares the tests of `rendezvous`; `protocol` shares the tests of `rendezvous`.
"""
