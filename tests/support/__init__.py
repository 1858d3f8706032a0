"""What several tests share: models, runs, processes, faults. Imported as `support`."""
