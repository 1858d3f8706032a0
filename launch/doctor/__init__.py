"""`spmdkit doctor`: checks everything that a run needs on this machine and in its job.

findings       the result of a check; all checks together, in one process or in all processes of a run
device_program known products and sums on each device, in a process of its own
host_checks    versions, devices, GPUs, cores, memory, open files, shared memory, host name
job_checks     the job and the variables it comes from, the coordinator's address, run.dir, other processes
"""
