"""Samples: where they are read from, and who draws which."""
