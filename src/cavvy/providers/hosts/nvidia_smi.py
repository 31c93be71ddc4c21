"""Reads the output of nvidia-smi: which GPUs are joined by NVLink, within a host and across the
hosts of a rack such as GB200 NVL72; the slices of GPUs on which Cavvy can make MIG instances, and
which instances it has made.

The texts about MIG are those that `supervisor.facts.read_mig` returns.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set

from cavvy.catalog.mig import MigProfile
from cavvy.providers.hosts.devices import HostDevice

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

_PLAIN = re.compile(r"[1-9]g\.[1-9][0-9]*gb")  # without what other profiles say about engines
_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+\d+/\d+\s", re.MULTILINE)
_PLACES = re.compile(r"GPU\s+(\d+) Profile ID\s+(\d+) Placements?\s*:\s*\{([\d,]+)\}:(\d+)")
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG \S+\s+\d+\s+\d+\s+(\d+):(\d+)\s", re.MULTILINE)


def read_islands(links: str, devices: Sequence[HostDevice]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of whole GPUs that NVLink joins directly or through a switch, in the order
    of the devices. GPUs without NVLink are in no group. `links` is the output of `nvidia-smi topo
    -m`: a matrix in which NV12 stands for 12 NVLinks between two GPUs."""
    names = {
        f"GPU{each.index}": each.id
        for each in devices
        if each.vendor == "nvidia" and not each.profile
    }
    groups: dict[str, set[str]] = {}
    for one, other in _list_pairs(links):
        if one in names and other in names:
            joined = groups.get(one, {one}) | groups.get(other, {other})
            groups.update(dict.fromkeys(joined, joined))
    found = dict.fromkeys(
        tuple(each for each in names if each in group) for group in groups.values()
    )
    return tuple(sorted(tuple(names[each] for each in group) for group in found))


def _list_pairs(links: str) -> Sequence[tuple[str, str]]:
    """Return the pairs of GPUs that have NVLinks."""
    pairs: list[tuple[str, str]] = []
    header: Sequence[str] = ()
    for line in _ESCAPES.sub("", links).splitlines():
        cells = line.split()
        if not header and cells[:1] == ["GPU0"] and "X" not in cells:
            header = [each for each in cells if re.fullmatch(r"GPU\d+", each)]
        elif header and cells and cells[0] in header:
            row = zip(header, cells[1:], strict=False)
            pairs += [(cells[0], other) for other, cell in row if re.fullmatch(r"NV\d+", cell)]
    return pairs


def read_domain(fabric: str) -> str:
    """Return the name of the NVLink domain that the host shares with other hosts, or "". `fabric`
    has a line with the UUID of the domain and the number of its part (clique) for each GPU; hosts
    that share no domain have a UUID of zeros. The name is that of the label
    `nvidia.com/gpu.clique` of Kubernetes.
    """
    lines = {line.strip() for line in fabric.splitlines() if line.strip()}
    found = re.fullmatch(rf"({_UUID})\s*,\s*(\d+)", lines.pop()) if len(lines) == 1 else None
    if found is None or not found[1].strip("0-"):
        return ""
    return f"{found[1].lower()}.{found[2]}"


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
