"""`spmdkit doctor`: what this process finds of its job, its software and its host, and what is wrong with it.

finding                               what a check says: found, from which variable, wrong or not, the fix
software                              versions, and plugins that do not fit them
devices                               what JAX opens, in a child process with a time limit; GPUs that it does not see
machine                               cores, memory, limits, names, locale
job                                   who this process is among how many, by which variables; the coordinator's address
folder                                the file system of run.dir
together                              several processes compare what they found
doctor                                all of it, as text or JSON
"""
