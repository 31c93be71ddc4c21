"""What the agent is told: its configuration file, and the work that comes with the claim."""

from __future__ import annotations

import json

PROTOCOL = 3


class BadConfig(Exception):
    """The configuration or the work is not what this version of the protocol says; the message
    names the field.
    """


class ConfigFields:
    """A JSON object whose fields are read with a type, a default, and an error that names what
    is wrong.
    """

    __slots__ = ("_raw", "_what")

    def __init__(self, raw: object, what: str) -> None:
        if not isinstance(raw, dict):
            raise BadConfig(f"{what}: expected an object, found {type(raw).__name__}")
        self._raw = raw
        self._what = what

    def names(self) -> list[str]:
        return [str(name) for name in self._raw]

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        value = self._raw.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "text", value)
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self._raw.get(name) is None else self.text(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number", value)
        return value

    def number_or_none(self, name: str) -> float | None:
        return None if self._raw.get(name) is None else self.number(name)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        return value

    def flag(self, name: str) -> bool:
        value = self._raw.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def texts(self, name: str) -> list[str]:
        value = self._raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts", value)
        return value

    def wholes(self, name: str) -> list[int]:
        value = self._raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(name, "a list of whole numbers", value)
        return value

    def table(self, name: str) -> dict[str, str]:
        """Names to texts; numbers and booleans become the text that a shell user expects."""
        value = self._raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return {str(key): _shown(item) for key, item in value.items()}

    def inner(self, name: str) -> ConfigFields | None:
        value = self._raw.get(name)
        return None if value is None else ConfigFields(value, f"{self._what}.{name}")

    def inners(self, name: str) -> list[ConfigFields]:
        value = self._raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return [ConfigFields(item, f"{self._what}.{name}") for item in value]

    def _wrong(self, name: str, expected: str, value: object) -> BadConfig:
        return BadConfig(f"{self._what}: `{name}` must be {expected}, not {value!r}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


class AgentConfig:
    """One agent's configuration: whose work it does, where it reports, and what of the machine
    it may use.
    """

    __slots__ = (
        "address",
        "boxed",
        "cache",
        "cpus",
        "device_indices",
        "devices",
        "gang",
        "grace_s",
        "home",
        "lease_s",
        "memory_mib",
        "node_address",
        "notices",
        "pin",
        "protocol",
        "rank",
        "storage",
        "taken",
        "token",
        "vendor",
    )

    def __init__(self, fields: ConfigFields) -> None:
        self.protocol = fields.whole("protocol", 1)  # the oldest that can read it
        if self.protocol > PROTOCOL:
            raise BadConfig(
                f"configuration: `protocol` is {self.protocol}; this agent speaks {PROTOCOL} at "
                "most"
            )
        self.gang = fields.text("gang")
        self.rank = fields.whole("rank")
        self.address = fields.text("address")
        token = fields.text("token")
        self.home = fields.text("home")
        self.token = read_token(self.home) or token
        self.pin = (
            fields.text_or_none("pin") or ""
        ).lower()  # SHA-256 of the control plane's certificate, if its own
        self.cache = fields.text("cache", self.home + "/cache")
        self.lease_s = fields.number("lease_s", 21600)
        self.grace_s = fields.number("grace_s", 10)
        self.boxed = fields.flag("boxed")  # the node itself was made from the work's image
        self.devices = (
            fields.texts("devices") if fields.has("devices") else None
        )  # None: all of the node's
        self.device_indices = fields.wholes("device_indices")
        self.vendor = (fields.text_or_none("vendor") or "").lower()
        self.cpus = fields.number_or_none("cpus")
        self.memory_mib = int(fields.number_or_none("memory_mib") or 0)
        self.node_address = fields.text("node_address", "127.0.0.1")
        self.storage = fields.text_or_none(
            "storage"
        )  # where nodes keep what outlives them, if not where the work says
        taken = fields.inner("taken")
        self.taken = ReclaimSignal(taken) if taken else None
        self.notices = [NoticeAddress(each) for each in fields.inners("notices")]


class ReclaimSignal:
    """How the place takes its nodes back: SIGTERM without the file `unless`, a file or signal
    `warning` before it.
    """

    __slots__ = ("seconds", "signal", "source", "unless", "warning", "warning_s")

    def __init__(self, fields: ConfigFields) -> None:
        self.unless = fields.text_or_none(
            "unless"
        )  # where it is, the gang is removed by us; None: orders say so
        self.seconds = fields.number("seconds")  # between SIGTERM and SIGKILL
        self.warning = fields.text_or_none("warning")
        self.signal = fields.text_or_none("signal")  # such as USR1
        self.warning_s = fields.number("warning_s", 0)  # between warning or signal and the end
        self.source = fields.text("source")


class NoticeAddress:
    """An address on the node that says when it is taken back, and how to read what it says."""

    def __init__(self, fields: ConfigFields) -> None:
        self.source = fields.text("source")
        self.url = fields.text("url")
        self.headers = fields.table("headers")
        token, hold, node, reply = (
            fields.inner(name) for name in ("token", "hold", "node", "reply")
        )
        self.token = NoticeTokenConfig(token) if token else None
        self.every_s = fields.number("every_s", 5)
        self.hold_query = hold.text("query") if hold else None  # {tag}: the ETag of the last answer
        self.first_tag = hold.text("first_tag") if hold else ""
        self.hold_s = hold.number("longest_s") if hold else 0.0
        self.list = fields.text_or_none("list")
        match = fields.inner("match")
        self.match = {name: match.texts(name) for name in match.names()} if match else {}
        self.node_url = node.text("url") if node else None
        self.node_field = node.text("field") if node else ""
        self.time = fields.text_or_none("time")
        self.within_s = fields.number("within_s", 30)
        self.advice = fields.flag("advice")
        self.reply_url = reply.text("url") if reply else None
        self.reply_body = reply.text("body") if reply else ""  # {id}: which event
        self.reply_id = reply.text("id") if reply else ""


class NoticeTokenConfig:
    """What has to be fetched first and sent along."""

    __slots__ = ("header", "headers", "life_s", "method", "url")

    def __init__(self, fields: ConfigFields) -> None:
        self.url = fields.text("url")
        self.header = fields.text("header")
        self.method = fields.text("method", "PUT")
        self.headers = fields.table("headers")
        self.life_s = fields.number("life_s", 21600)


class CheckpointConfig:
    """The folder of the work that outlives it, and the storage that it leads to."""

    __slots__ = ("every_s", "path", "storage", "sync")

    def __init__(self, fields: ConfigFields) -> None:
        self.path = fields.text("path")
        self.storage = fields.text_or_none("storage")
        self.sync = fields.flag(
            "sync"
        )  # there is no storage: the control plane is given what the work writes
        self.every_s = fields.number_or_none("every_s")


class VolumeConfig:
    """Files beside the work's folder: where they come from, and under which path the work sees
    them.
    """

    __slots__ = ("kind", "options", "path", "read_only", "source")

    def __init__(self, fields: ConfigFields) -> None:
        self.kind = fields.text("kind")  # named, host or nfs
        self.source = fields.text("source")
        self.path = fields.text("path")
        self.read_only = fields.flag("read_only")
        self.options = fields.text("options", "")


class BuildConfig:
    """A Dockerfile in the frozen folder, of which the image is made."""

    __slots__ = ("args", "dockerfile", "path", "target")

    def __init__(self, fields: ConfigFields) -> None:
        self.path = fields.text("path")
        self.dockerfile = fields.text("dockerfile", "Dockerfile")
        self.target = fields.text("target", "")
        self.args = fields.table("args")


class CheckConfig:
    """What the node must show before the work starts: the share of its kind's figures, and the
    links' speed.
    """

    __slots__ = ("bandwidth_gbs", "kind", "link_mbps", "memory_mib", "share")

    def __init__(self, fields: ConfigFields) -> None:
        self.share = fields.number("share")
        self.link_mbps = fields.number(
            "link_mbps", 0
        )  # between two nodes; 0: measured and told only
        self.kind = fields.text("kind", "")  # of each GPU, "" where nobody knows it
        self.memory_mib = fields.number("memory_mib", 0)
        self.bandwidth_gbs = fields.number("bandwidth_gbs", 0)  # of its memory, by its data sheet


class WorkConfig:
    """What this rank has to do, as it came with the claim."""

    def __init__(self, fields: ConfigFields) -> None:
        self.job = fields.text("job")
        self.job_id = fields.text("job_id")
        self.project = fields.text("project")
        self.attempt = fields.whole("attempt")
        self.nodes = fields.whole("nodes", 1)
        self.addresses = fields.texts("addresses") or ["127.0.0.1"]
        self.master_port = fields.whole("master_port", 29500)
        self.accelerators_per_node = fields.whole("accelerators_per_node", 0)
        self.gang_key = fields.text("gang_key", "")
        self.run = fields.text("run")
        self.setup = fields.text_or_none("setup")
        self.setup_key = fields.text_or_none("setup_key")
        self.setup_uses = (
            fields.texts("setup_uses") if fields.has("setup_uses") else None
        )  # None: the whole folder
        self.image = fields.text_or_none("image")
        self.image_login = fields.text_or_none("image_login")  # USER:PASSWORD
        build = fields.inner("build")
        self.build = BuildConfig(build) if build else None
        self.env = fields.table("env")
        self.secrets = fields.table("secrets")
        self.params = fields.table("params")
        check = fields.inner("check")
        self.check = CheckConfig(check) if check else None
        workdir, git, checkpoint = (
            fields.inner("workdir"),
            fields.inner("git"),
            fields.inner("checkpoint"),
        )
        self.snapshot = workdir.text_or_none("snapshot") if workdir else None
        self.git_url = git.text("url") if git else None
        self.git_commit = git.text_or_none("commit") if git else None
        self.checkpoint = CheckpointConfig(checkpoint) if checkpoint else None
        self.inputs = [
            (item.text("source"), item.text("target")) for item in fields.inners("inputs")
        ]
        self.streams = [
            index
            for index, item in enumerate(fields.inners("inputs"))
            if item.text("mode", "copy") == "stream"
        ]
        outputs = fields.inners("outputs")
        self.outputs = [(item.text("source"), item.text("target")) for item in outputs]
        self.mirrored = {
            at: item.number("every_s") for at, item in enumerate(outputs) if item.has("every_s")
        }
        self.volumes = [VolumeConfig(item) for item in fields.inners("volumes")]
        self.grace_s = fields.number("grace_s", 10)
        self.keep_s = fields.number(
            "keep_s", 0
        )  # how long to wait for other work when this is over
        self.idle_s = fields.number_or_none("idle_s")
        self.log_limit_mib = fields.number("log_limit_mib", 1024)


def read_token(home: str) -> str:
    """The token that came with the claim; "" before, and where the configuration's own is good
    for all.
    """
    try:
        with open(home + "/token", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_config(path: str) -> AgentConfig:
    """Raises BadConfig, OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            raw = json.load(file)
        except ValueError as error:
            raise BadConfig(f"{path} is not JSON: {error}") from error
    return AgentConfig(ConfigFields(raw, "configuration"))
