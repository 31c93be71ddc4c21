"""Readers of data formats. A reader returns samples by index, so that `cavvy.train` can shuffle
them, split them over ranks, and resume.

from cavvy import readers, train

data = run.data(readers.open_samples("webdataset:/data/shards"), global_batch=512)

A reader imports the package of its format on first use.
"""

from cavvy.readers.known import READERS, open_samples
from cavvy.readers.mds import write_shards

__all__ = ["READERS", "open_samples", "write_shards"]
