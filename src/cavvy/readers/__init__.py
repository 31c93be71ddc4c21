"""Readers of formats: each gives samples by index, so that `cavvy.train` can shuffle, split and
resume over them.

from cavvy import readers, train

data = run.data(readers.open_samples("webdataset:/data/shards"), global_batch=512)

Each reader imports its format's package on first use; this module imports no other one.
"""

from cavvy.readers.known import READERS, open_samples
from cavvy.readers.mds import write_shards

__all__ = ["READERS", "open_samples", "write_shards"]
