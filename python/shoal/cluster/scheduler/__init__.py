"""The scheduler: members, jobs, clocks and splits of the data."""
