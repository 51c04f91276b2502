"""The HDF5 file of a run: written, read, summed up, exported."""
