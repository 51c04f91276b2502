"""The job: its tables, its files and its target."""
