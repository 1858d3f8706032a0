"""Guards that watch a run while it trains: progress, slow processes, equal replicas, and the time spent."""
