"""The fields beside the editor of a task file, which change keys of the file: the GPU and how many,
spot, region, time and budget.
"""

import re
from collections.abc import Mapping
from contextlib import suppress

from msgspec import Struct

from cavvy.spec.editing import NotEditable, read_key, set_key

PREFIX = "set."  # begins the names of the fields
_COUNTED = re.compile(r"(.+):(\d{1,5})")
_WORDS = re.compile(r"[\w.:+$,;*/ -]{0,80}")  # values that are YAML in one line as they stand
_PATHS = {
    "spot": ("resources", "spot"),
    "region": ("resources", "regions"),
    "duration": ("limits", "duration"),
    "budget": ("limits", "budget"),
}
_GPU = ("resources", "gpu")


class TaskForm(Struct, frozen=True, kw_only=True):
    """What the fields show. `gpu` is a name with or without memory, or what the file has instead,
    such as a list."""

    gpu: str = ""
    count: str = ""
    spot: str = ""
    region: str = ""
    duration: str = ""
    budget: str = ""


def read_form(text: str) -> TaskForm | None:
    """Return what the fields show of a file, or None if its keys cannot be changed."""
    try:
        values = {name: read_key(text, path) for name, path in _PATHS.items()}
        gpu = read_key(text, _GPU)
    except NotEditable:
        return None
    count = ""
    if found := _COUNTED.fullmatch(gpu):
        gpu, count = found[1], found[2]
    values["region"] = values["region"].removeprefix("[").removesuffix("]")
    return TaskForm(gpu=" ".join(gpu.split()), count=count, **values)


def write_form(text: str, given: Mapping[str, str]) -> str:
    """Return the file with those fields of a form that differ from it; the file stays as it is
    where a field has what no value can be."""
    known = read_form(text)
    if known is None:
        return text
    wanted = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in given.items()
        if name.startswith(PREFIX) and _WORDS.fullmatch(value.strip())
    }
    changed = {name for name, value in wanted.items() if value != getattr(known, name, value)}
    with suppress(NotEditable):
        if changed & {"gpu", "count"}:
            gpu, count = wanted.get("gpu", known.gpu), wanted.get("count", known.count)
            text = set_key(text, _GPU, f"{gpu}:{count}" if gpu and count not in ("", "1") else gpu)
        for name in changed & _PATHS.keys():
            value = wanted[name]
            if name == "region" and value:
                value = f"[{value}]"
            text = set_key(text, _PATHS[name], value)
    return text
