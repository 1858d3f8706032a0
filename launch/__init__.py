"""The command line and the launcher. Read `cli` first, then `train`, `local` and `processes`."""
