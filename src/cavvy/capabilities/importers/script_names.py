"""Finds what a batch script names and a node lacks: variables that nothing sets, and programs of a
cluster.
"""

import re
from collections.abc import Collection, Iterator

from cavvy.domain.values import Struct
from cavvy.spec.problems import SourceMark

_MOST = 20  # names of a script that are listed
_USED = re.compile(r"\$(?:\{!?(?P<braced>\w+)(?P<after>.?)|(?P<plain>\w+))")
_ASSIGNED = re.compile(r"(?:^|[\s;&|(])(\w+)\+?=")
# what a program that only a cluster has is replaced by
PROGRAMS = {
    **dict.fromkeys(
        ("aprun", "ibrun", "jsrun", "mpprun"), "`mpirun` starts processes on all nodes"
    ),
    **dict.fromkeys(("salloc", "sattach", "strigger"), "the job has its nodes already"),
    **dict.fromkeys(("sprio", "sshare", "sreport", "sacctmgr"), "nodes know no cluster"),
    **dict.fromkeys(("sstat", "seff"), "`cavvy nodes top` and `cavvy status` show what a job uses"),
    "sbcast": "the working folder is on all nodes",
    **dict.fromkeys(("pbs_tmrsh", "pbs_attach"), "`pbsdsh` and `mpirun` start processes"),
}
_CALLED = re.compile(
    rf"(?:^|[;&|(`]|\$\()[ \t]*(?:\w+=\S*[ \t]+)*(?:(?:time|exec|nohup)[ \t]+)?"
    rf"(?P<name>{'|'.join(PROGRAMS)})(?=[\s;)`]|$)"
)


class MissingName(Struct, frozen=True):
    """A variable, as `$NAME`, or a program that a script names and a node lacks."""

    mark: SourceMark
    name: str


def list_missing(text: str, prefix: str, known: Collection[str]) -> Iterator[MissingName]:
    """Yield the variables that begin with `prefix`, that a script reads without a default, and that
    are not `known` and not set by the script; and the programs of a cluster that it calls; each
    once, in the order of their lines.
    """
    lines = [line.split(" #")[0] for line in text.splitlines()]
    own = {name for line in lines for name in _ASSIGNED.findall(line)}
    told: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or len(told) >= _MOST:
            continue
        for name, column in _list_names(line, prefix, own | set(known)):
            if name not in told:
                told.add(name)
                yield MissingName(SourceMark(line=number, column=column + 1), name)


def _list_names(line: str, prefix: str, known: Collection[str]) -> Iterator[tuple[str, int]]:
    for found in _USED.finditer(line):
        name = found["braced"] or found["plain"]
        has_default = (found["after"] or " ") in ":-+?"
        if name.startswith(prefix) and name not in known and not has_default:
            yield f"${name}", found.start()
    for found in _CALLED.finditer(line):
        yield found["name"], found.start("name")
