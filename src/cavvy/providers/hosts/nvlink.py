"""Reads which GPUs are joined by NVLink, from the output of nvidia-smi: within a host, and across
the hosts of a rack such as GB200 NVL72."""

import re
from collections.abc import Sequence

from cavvy.providers.hosts.devices import HostDevice

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"


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
