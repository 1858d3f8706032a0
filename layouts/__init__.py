"""TODO-contract."""
