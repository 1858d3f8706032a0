"""Process startup: a process finds its place in the run, meets the other processes, and connects JAX.

variables    reads the job from the environment variables of each launcher; the table SOURCES
detection    merges all sources into one `Job`, or reports missing and contradicting variables
addresses    parses "host:port"; chooses the interface that the coordinator listens on; keeps proxies out of the way
rendezvous   waits until all processes are at the coordinator's address; reports missing and foreign processes
initialize   `initialize`: rendezvous, then `jax.distributed.initialize`
worker       a process of a run: its environment variables, joining the others, and leaving them on an error
"""
