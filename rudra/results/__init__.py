"""HDF5 result files: reading, writing, summaries and export."""
