"""spmdkit: a distributed SPMD training runtime for JAX."""
