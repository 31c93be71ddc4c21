"""The base install stays small: what Cavvy without extras brings, by the metadata of what is
installed here.
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

import cavvy

PACKAGES, MEBIBYTES = 40, 80  # as `du -m` counts


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(name: str) -> dict[str, Distribution]:
    """The distribution and all that it needs, with the extras that are asked for on the way."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(plain(name), "")]
    while todo:
        each, extra = todo.pop()
        if (each, extra) in seen:
            continue
        seen.add((each, extra))
        try:
            found[each] = distribution(each)
        except PackageNotFoundError as error:
            raise AssertionError(
                f"{each} is needed by the base install and is not installed"
            ) from error
        for line in found[each].requires or ():
            need = Requirement(line)
            environment = {**default_environment(), "extra": extra}
            if need.marker is None or need.marker.evaluate(environment):
                todo += [(plain(need.name), ""), *((plain(need.name), one) for one in need.extras)]
    return found


def size(files: Distribution) -> int:
    """Bytes on disk, byte code not counted."""
    paths = [
        Path(str(files.locate_file(path))) for path in files.files or () if path.suffix != ".pyc"
    ]
    return sum(path.stat().st_size for path in paths if path.exists())


def test_the_base_install_is_small() -> None:
    found = closure("cavvy")
    source = Path(cavvy.__file__).parent
    own = sum(
        path.stat().st_size
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    total = own + sum(size(each) for name, each in found.items() if name != "cavvy")
    assert len(found) <= PACKAGES, sorted(found)
    assert total <= MEBIBYTES << 20, f"{total / (1 << 20):.1f} MiB"
