"""The job: its tables, its files, its target."""
