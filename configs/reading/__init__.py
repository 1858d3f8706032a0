"""From the text of a config, its overrides and their names to plain values, each with the place it came from."""
