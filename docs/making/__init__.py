"""What makes pages and pictures of the documentation: read by `docs/figures.py` and `docs/site_hooks.py`."""
