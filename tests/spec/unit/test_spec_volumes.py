"""`volumes` of the task file: what each form means, what each mistake is told, and which places
refuse them.
"""

import pytest

from cavvy.domain.tasks import Objection, TaskSpec, Volume, VolumeKind
from cavvy.spec import SpecError
from cavvy.spec.support import refusals
from cavvy.task_files import parse_task

NAMED, HOST, NFS = VolumeKind.NAMED, VolumeKind.HOST, VolumeKind.NFS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:/mnt/data", Volume(kind=NAMED, source="data", path="/mnt/data")),
        (
            "vol-0ab1:/mnt/data/:ro",
            Volume(kind=NAMED, source="vol-0ab1", path="/mnt/data", read_only=True),
        ),
        ("/scratch:/scratch:rw", Volume(kind=HOST, source="/scratch", path="/scratch")),
        ("/scratch/a:data/in", Volume(kind=HOST, source="/scratch/a", path="data/in")),
        ("nas:/export/home:/home/x", Volume(kind=NFS, source="nas:/export/home", path="/home/x")),
        ("'[fd00::1]:/e:d'", Volume(kind=NFS, source="[fd00::1]:/e", path="d")),
        (
            "{name: d, path: /d, size: 200GB, type: gp3, read_only: true}",
            Volume(kind=NAMED, source="d", path="/d", size_gib=200, type="gp3", read_only=True),
        ),
        (
            "{name: d, path: /d, size: 200GB, keep: false}",
            Volume(kind=NAMED, source="d", path="/d", size_gib=200, keep=False),
        ),
        ("{host: /a/./b, path: ./c}", Volume(kind=HOST, source="/a/b", path="c")),
        (
            "{nfs: nas:/e, path: /d, options: 'nfsvers=4.1,ro'}",
            Volume(kind=NFS, source="nas:/e", path="/d", options="nfsvers=4.1,ro"),
        ),
    ],
)
def test_forms(text: str, expected: Volume) -> None:
    assert parse_task(f"run: x\nvolumes: [{text}]").volumes == (expected,)
    assert parse_task(f"run: x\nvolumes: {text}").volumes == (expected,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data", "needs a source and a path"),
        ("data:mnt", "is not an absolute path; a provider's volume needs an absolute path"),
        ("s3://bucket/a:/data", "add the URL to `inputs` or `outputs`"),
        ("~/data:/data", "~ is only expanded by a shell"),
        ("./data:/data", "use `workdir`"),
        ("/a:/etc", "is a system path"),
        ("/a:/b/../etc", "without .."),
        ("/a:../b", "leads out of the working folder"),
        ("{path: /a}", "names no source"),
        ("{name: a, host: /a, path: /b}", "names two sources"),
        ("{name: a, path: b}", "is not an absolute path"),
        ("{host: /a, path: /b, size: 5GB}", "`size` has no meaning with `host`"),
        ("{name: a, path: /b, type: gp3}", "add `size`"),
        ("{name: a, path: /b, keep: false}", "needs `size`"),
        ("{nfs: nas:/e, path: /b, keep: false}", "`keep` has no meaning with `nfs`"),
        ("{name: a, mount_path: /b}", "write `path`"),
        ("{host: /a, path: /b, read_only: 'yes'}", "neither true nor false"),
        ("{nfs: nas, path: /b}", "is not an NFS export"),
        ("{nfs: nas:/e, path: /b, options: 'a b'}", "is not a list of mount options"),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_task(f"run: x\nvolumes:\n  - {text}")
    assert told in str(caught.value)
    assert all(problem.line >= 2 for problem in caught.value.problems)


def test_two_at_one_path() -> None:
    with pytest.raises(SpecError, match="two volumes have the path /data"):
        parse_task("run: x\nvolumes: [a:/data, /b:/data]")


def test_places_refuse_by_feature() -> None:
    task = TaskSpec(name="t", run="x", volumes=(Volume(kind=NAMED, source="a", path="/a"),))
    assert refusals(task, {"volumes": "none here", "mounts": "no"}) == [
        Objection("volumes", "none here")
    ]
    task = TaskSpec(name="t", run="x", volumes=(Volume(kind=HOST, source="/a", path="/a"),))
    assert refusals(task, {"volumes": "none here", "mounts": "no"}) == [Objection("volumes", "no")]
    assert refusals(task, {"volumes": "none here"}) == []
