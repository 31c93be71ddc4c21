"""Reads, from the output of nvidia-smi, the slices of GPUs on which Cavvy can make MIG instances,
and which instances it has made. The texts are those that `supervisor.facts.read_mig` returns.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set

from cavvy.catalog.mig import MigProfile

_PLAIN = re.compile(r"[1-9]g\.[1-9][0-9]*gb")  # without what other profiles say about engines
_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+\d+/\d+\s", re.MULTILINE)
_PLACES = re.compile(r"GPU\s+(\d+) Profile ID\s+(\d+) Placements?\s*:\s*\{([\d,]+)\}:(\d+)")
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG \S+\s+\d+\s+\d+\s+(\d+):(\d+)\s", re.MULTILINE)


def list_profiles(texts: Mapping[str, str], index: int) -> Sequence[MigProfile]:
    """Return the profiles of the instances that Cavvy can make on the GPU with this index."""
    names = {
        number: name
        for gpu, name, number in _PROFILE.findall(texts.get("profiles", ""))
        if int(gpu) == index and _PLAIN.fullmatch(name)
    }
    return [
        MigProfile(names[number], int(size), tuple(map(int, starts.split(","))))
        for gpu, number, starts, size in _PLACES.findall(texts.get("places", ""))
        if int(gpu) == index and number in names
    ]


def list_free(
    texts: Mapping[str, str], index: int, uuid: str, profiles: Sequence[MigProfile]
) -> Sequence[int]:
    """Return the slices of a GPU on which no one but Cavvy has made an instance."""
    made = {each["start"] for each in _read_made(texts) if each.get("gpu") == uuid}
    slices = {at for each in profiles for start in each.starts for at in _cover(start, each.size)}
    for gpu, start, size in _INSTANCE.findall(texts.get("instances", "")):
        if int(gpu) == index and int(start) not in made:
            slices -= {*_cover(int(start), int(size))}
    return sorted(slices)


def list_made(texts: Mapping[str, str], gpu: str) -> Set[str]:
    """Return the UUIDs of the instances that agents have made. Of an agent that was killed before
    it could record a UUID, the profile is returned: any instance with it may be the agent's."""
    made = [each for each in _read_made(texts) if each.get("gpu") == gpu]
    return {str(each.get("uuid", each["profile"])) for each in made}


def _cover(start: int, size: int) -> range:
    return range(start, start + size)


def _read_made(texts: Mapping[str, str]) -> Sequence[Mapping[str, object]]:
    return [json.loads(line) for line in texts.get("made", "").splitlines()]
