"""Before a run in several processes collects tests, each process rewrites the asserts of its share
of the files for pytest and caches the results for all processes.

Every process has to collect every test. Without this, all processes of a run in a fresh checkout
would rewrite the same files at the same time.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def list_share(folders: Iterable[Path], process: int, processes: int) -> list[Path]:
    """The test files that one process rewrites: every `processes`-th file below the folders."""
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    return files[process::processes]


def rewrite_share(config: pytest.Config, process: int, processes: int) -> None:
    """Write the cache of each file in the share of a process, unless the cache is up to date.

    Folders that are arguments of the run are shared out; files that are named one by one are not.
    """
    folders = [Path(argument) for argument in config.args if Path(argument).is_dir()]
    for file in list_share(folders, process, processes):
        cache = rewrite.get_cache_dir(file) / (file.name[: -len(".py")] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, cache) is None and rewrite.try_makedirs(cache.parent):
            code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code[1], code[0], cache)
