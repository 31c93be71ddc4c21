"""Readers of data formats. A reader returns samples by index, so that `cavvy.train` can shuffle
them, split them over ranks, and resume.

from cavvy import readers, train

data = run.data(readers.open_samples("webdataset:/data/shards"), global_batch=512)

A reader imports the package of its format on first use.
"""

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from cavvy.readers.mds import write_shards

__all__ = ["READERS", "open_samples", "write_shards"]
# For each name: the submodule, the class in it, and the packages that the class needs.
READERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "webdataset": ("tar", "WebDataset", ()),
    "tfrecord": ("records", "TFRecord", ()),
    "mds": ("mds", "Mds", ("numpy",)),
    "parquet": ("tables", "Parquet", ("pyarrow",)),
    "hdf5": ("tables", "Hdf5", ("h5py",)),
    "images": ("folders", "ImageFolder", ("numpy", "PIL")),
    "huggingface": ("folders", "HuggingFace", ("datasets",)),
    "litdata": ("folders", "LitData", ("litdata",)),
}


def open_samples(where: str, **options: Any) -> Any:
    """Open "NAME:path". Returns a source whose samples can be read by index.

    Raises: ValueError: the format is unknown. FileNotFoundError: the path does not exist.
    ImportError: the package of the format is not installed.
    """
    name, _, path = where.partition(":")
    if name not in READERS or not path:
        close = get_close_matches(name, READERS, n=1) if path else []
        hint = f"; did you mean {close[0]}:{path}?" if close else ""
        raise ValueError(
            f"{where!r} is not NAME:path, where NAME is one of {', '.join(READERS)}{hint}"
        )
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no {path}")
    module, reader, needs = READERS[name]
    for package in needs:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            wheel = {"PIL": "pillow"}.get(package, package)
            raise ImportError(
                f"the reader of {name} needs {package}; run `pip install {wheel}`"
            ) from error
    return getattr(import_module(f"cavvy.readers.{module}"), reader)(path, **options)
