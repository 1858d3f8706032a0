"""Pipeline schedules in characters and as SVG."""
