"""Readers of the data sets that Rudra knows: files to sources, and every damage to one readable line.

A reader takes the data table and which splits are wanted, and gives `Arrays`. Without a split it reads what tells their
shapes and numbers alone.
"""

from collections.abc import Callable, Collection

from rudra.data.readers.arff import read_arff
from rudra.data.readers.arrays import read_hdf5, read_npz
from rudra.data.readers.cifar import read_cifar10
from rudra.data.readers.common import SPLITS, Arrays, check_labels
from rudra.data.readers.csv import read_csv
from rudra.data.readers.digits import read_digits
from rudra.data.readers.folder import read_folder
from rudra.data.readers.idx import read_idx
from rudra.data.readers.libsvm import read_libsvm
from rudra.data.readers.text import read_text
from rudra.job.tables import DataTable

__all__ = ["READERS", "SPLITS", "Arrays", "check_labels"]

READERS: dict[str, Callable[[DataTable, Collection[str]], Arrays]] = {
    "digits": read_digits,
    "idx": read_idx,
    "cifar10": read_cifar10,
    "libsvm": read_libsvm,
    "csv": read_csv,
    "npz": read_npz,
    "hdf5": read_hdf5,
    "arff": read_arff,
    "text": read_text,
    "folder": read_folder,
}
