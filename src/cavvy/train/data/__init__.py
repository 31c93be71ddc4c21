"""The data of a run: a source of samples, and an order of the samples that any number of ranks can
share and resume.
"""

from cavvy.train.data.sources import Source, Tensors, open_source, register_reader
from cavvy.train.data.stream import Batch, BatchShare, Data, move

__all__ = [
    "Batch",
    "BatchShare",
    "Data",
    "Source",
    "Tensors",
    "move",
    "open_source",
    "register_reader",
]
