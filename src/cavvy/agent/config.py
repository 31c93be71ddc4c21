"""Reads the agent's input: its configuration file, and the work that it receives with the claim.

Each class lists its fields with types and defaults, and is decoded from JSON. The annotations are
read as text: importing `typing` and `dataclasses` would delay every agent's start by some
milliseconds.
"""

from __future__ import annotations

import json

from .disk import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    TextLists = dict[str, list[str]]

PROTOCOL = 3
TABLE = "dict[str, str]"


class BadConfig(Exception):
    """Raised if the configuration or the work does not have the format of this protocol version.
    The message names the invalid field.
    """


def _is_list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


# type -> its name in errors, and a function that tests whether a value has this type
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "int": ("a whole number", lambda value: type(value) is int),
    "float": ("a number", lambda value: type(value) in (int, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "list[str]": ("a list of strings", _is_list_of(str)),
    "list[int]": ("a list of whole numbers", _is_list_of(int)),
    "list": ("a list", _is_list_of(object)),
    TABLE: ("an object", lambda value: isinstance(value, dict)),
    "TextLists": (
        "an object whose values are lists of strings",
        lambda value: isinstance(value, dict) and all(map(_is_list_of(str), value.values())),
    ),
}
EMPTY: dict[str, Callable[[], object]] = {
    "bool": bool,
    "list": list,
    "dict": dict,
    "TextLists": dict,
}


class ConfigFields:
    """Reads the fields of a JSON object. Each field has a type and a default. Errors name the
    field."""

    __slots__ = ("_raw", "_what")

    def __init__(self, raw: object, what: str) -> None:
        if not isinstance(raw, dict):
            raise BadConfig(f"{what}: expected an object, found {type(raw).__name__}")
        self._raw = raw
        self._what = what

    def read(self, name: str, kind: str, default: object = None) -> Any:
        """Read a field whose type is `kind`, an annotation such as "int" or "list[VolumeConfig]".

        If the field is missing or null, return the default. If the field has no default, return the
        empty value of `kind`: an empty list or object, False or None. Raise BadConfig if the field
        is missing, has no default, and has a type without an empty value, such as "int".
        """
        value, plain = self._raw.get(name), kind.replace(" | None", "")
        if value is None and (default is not None or plain != kind):
            return default
        if value is None and (empty := EMPTY.get(kind.partition("[")[0])):
            return empty()
        if plain in KINDS:
            expected, fits = KINDS[plain]
            if not fits(value):
                raise BadConfig(f"{self._what}: `{name}` must be {expected}, not {value!r}")
            if plain == TABLE and isinstance(value, dict):  # numbers become text, as in a shell
                return {str(key): _shown(item) for key, item in value.items()}
            return value
        make, what = globals()[plain.replace("list[", "").rstrip("]")], f"{self._what}.{name}"
        if plain.startswith("list["):
            items = self.read(name, "list")
            return [make(ConfigFields(item, what)) for item in items]
        return make(ConfigFields(value, what))

    def inner(self, name: str) -> ConfigFields | None:
        value = self._raw.get(name)
        return None if value is None else ConfigFields(value, f"{self._what}.{name}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


class ConfigRecord:
    """A JSON object. The class's annotations list its fields, and the class's attributes contain
    their defaults."""

    def __init__(self, fields: ConfigFields) -> None:
        for name, kind in type(self).__annotations__.items():
            setattr(self, name, fields.read(name, kind, getattr(type(self), name, None)))


class ReclaimSignal(ConfigRecord):
    """How the agent learns that the provider reclaims the node. A SIGTERM to the agent means this,
    except if the file `unless` exists. Before the SIGTERM, the provider can warn the agent: it
    creates the file `warning`, or sends the signal `signal`.
    """

    source: str
    seconds: float  # grace period in seconds, between SIGTERM and SIGKILL
    # If this file exists, Cavvy has sent the SIGTERM, not the provider. None if Cavvy never sends
    # SIGTERM, but stops the agent by an order.
    unless: str | None
    warning: str | None
    signal: str | None  # a signal such as USR1
    warning_s: float = 0  # seconds from the warning until the node is reclaimed


class NoticeTokenConfig(ConfigRecord):
    """A token for the notice address. The agent fetches the token first and sends it with each
    request."""

    url: str
    header: str
    method: str = "PUT"
    headers: dict[str, str]
    life_s: float = 21600


class NoticeHoldConfig(ConfigRecord):
    """The parameters of a long poll: a request that the server answers only after a change."""

    query: str  # {tag} is replaced by the ETag of the last answer
    first_tag: str
    longest_s: float


class NoticeNodeConfig(ConfigRecord):
    """How the agent learns which events concern this node: `url` returns the node's name, and
    `field` is the name of the field of an event that contains the names of nodes.
    """

    url: str
    field: str


class NoticeReplyConfig(ConfigRecord):
    """The request that acknowledges an event. The field `id` contains the name of a field of the
    event. The agent replaces the text {id} in `body` by the value of this field.
    """

    url: str
    body: str
    id: str


class NoticeAddress(ConfigRecord):
    """An address that the agent polls for reclaim notices, and the format
    of the responses."""

    source: str
    url: str
    headers: dict[str, str]
    token: NoticeTokenConfig | None
    every_s: float = 5
    hold: NoticeHoldConfig | None
    list: str | None
    match: TextLists
    node: NoticeNodeConfig | None
    time: str | None
    within_s: float = 30
    advice: bool
    reply: NoticeReplyConfig | None


class OrderConfig(ConfigRecord):
    """An order from the control plane to this agent, such as to stop the work."""

    seq: int
    kind: str
    seconds: float = 0
    reason: str = ""


class ExecConfig(ConfigRecord):
    """A command or session that a user requested."""

    id: str
    command: list[str]
    session: bool
    attached: bool  # whether the command ends when its user disconnects


class RankPaths:
    """The paths of one rank's files and folders: files that the work uses are in the rank's home
    folder, the agent's own records are in its private folder.
    """

    def __init__(self, home: str, private: str) -> None:
        self.folder = home + "/work"
        self.notice_file = home + "/notice.json"
        self.advice_file = home + "/advice.json"
        self.progress_file = home + "/progress.json"
        self.every_file = home + "/every"
        self.host_file = home + "/hosts"
        self.mpi_program = home + "/mpi.py"
        self.run_script = home + "/run.sh"
        self.setup_script = home + "/setup.sh"
        self.entry_script = home + "/entry.sh"
        self.enter_script = home + "/enter.sh"
        self.phase_file = home + "/phase"  # contains the phase of a container: setup, failed or run
        self.log_folder = private + "/log"
        self.outbox_file = private + "/outbox"
        self.started_file = private + "/started"
        self.status_file = private + "/status"
        self.exit_file = private + "/exit.json"
        # this file exists while messages are undelivered
        self.undelivered_file = private + "/undelivered"


class AgentConfig(ConfigRecord, RankPaths):
    """The configuration of one agent: its rank, the control plane's address, and the part of the
    machine that it may use. `home` is the rank's own folder, which the work can change. `private`
    holds the agent's records, and is hidden from the work where the agent can hide folders.
    """

    protocol: int = 1  # lowest protocol version that can read this file
    gang: str
    rank: int
    address: str
    token: str
    home: str
    private: str = ""  # "" means `home`
    pin: str = ""  # SHA-256 of the control plane's certificate, if it is self-signed
    cache: str = ""
    # The names of folders in `cache`: `own_cache` belongs to the work's project; work of other
    # projects has never seen `fresh_cache`, which is used if this machine cannot hide `hides`. If
    # a name is "", the work uses `cache` itself, or `own_cache` in place of `fresh_cache`.
    own_cache: str = ""
    fresh_cache: str = ""
    hides: str = ""  # a folder that the work must not see, except this rank's parts of it
    # whether namespaces can hide the folder `hides` on this machine; None: the agent tests it
    covers: bool | None
    # whether `covers` also gives the work its own process namespace; tested with `covers`
    alone: bool
    # whether the work is also separated from all other processes of this user
    separates: bool
    # with `covers`, files and folders of the server that the work must not change
    obeys: list[str]
    lease_s: float = 21600
    grace_s: float = 10
    # After the work has ended, the agent exits if the server has been silent for this many seconds.
    # 0: the agent waits for the server without limit, because the provider deletes the rank's home
    # with the node.
    leaves_after_s: float = 0
    boxed: bool  # whether the node itself was started from the work's image
    devices: list[str] | None  # None means all GPUs of the node
    device_indices: list[int]
    vendor: str = ""
    cpus: float | None
    memory_mib: int = 0
    node_address: str = "127.0.0.1"
    # the nodes' persistent folder, if its path here differs from the one in WorkConfig
    storage: str | None
    taken: ReclaimSignal | None
    notices: list[NoticeAddress]
    placed: list[str]  # full paths of inputs that the provider has placed on the node

    def __init__(self, fields: ConfigFields) -> None:
        super().__init__(fields)
        self.private = self.private or self.home
        RankPaths.__init__(self, self.home, self.private)
        if self.protocol > PROTOCOL:
            raise BadConfig(
                f"configuration: `protocol` is {self.protocol}; this agent supports at "
                f"most {PROTOCOL}"
            )
        # The token that came with the claim replaces the configured one.
        self.token = read_text(self.private + "/token") or self.token
        self.pin, self.vendor = self.pin.lower(), self.vendor.lower()
        self.cache = self.cache or self.home + "/cache"
        self.caches = self.cache  # the folder that contains the caches of all projects
        self.shown: list[str] = []  # the folders below `hides` that the work sees
        self.kept = ""  # the folder for new entries of home folders; "": there are none


class CheckpointConfig(ConfigRecord):
    """The task's checkpoint folder, which outlives the work, and the folder's storage location."""

    path: str
    storage: str | None
    sync: bool  # whether the agent uploads checkpoints, because the nodes share no storage
    every_s: float | None


class VolumeConfig(ConfigRecord):
    """Files outside the working folder: their source, and the path where the work sees them."""

    kind: str  # one of named, host, nfs, folder
    source: str
    path: str
    read_only: bool
    options: str = ""


class TransferConfig(ConfigRecord):
    """One input or output of the task. One of `source` and `target` is a path on this node, the
    other is a URL."""

    source: str
    target: str
    mode: str = "copy"
    every_s: float | None


class BuildConfig(ConfigRecord):
    """A Dockerfile in the frozen working folder from which the image is built."""

    path: str
    dockerfile: str = "Dockerfile"
    target: str = ""
    args: dict[str, str]


class CheckConfig(ConfigRecord):
    """The requirements of the node check: the memory of the GPU model, a minimum share of the
    model's memory bandwidth, and a minimum link speed.
    """

    share: float
    # minimum speed between two nodes; if 0, the speed is measured but not judged
    link_mbps: float = 0
    kind: str = ""  # the model of each GPU, or "" if it is unknown
    memory_mib: int = 0
    bandwidth_gbs: float = 0  # data-sheet bandwidth of the GPU's memory


class WorkdirConfig(ConfigRecord):
    """A snapshot of the working folder at submission. `snapshot` is the hash of the snapshot's
    manifest."""

    snapshot: str


class GitConfig(ConfigRecord):
    """A Git commit that is checked out as the working folder."""

    url: str
    commit: str = "HEAD"


class TunnelPeerConfig(ConfigRecord):
    """A rank in the tunnel: its public key or the software that it lacks, its address outside the
    tunnel, and its address inside the tunnel."""

    key: str
    endpoint: str
    address: str
    missing: str = ""


class TunnelConfig(ConfigRecord):
    """The encrypted tunnel between the ranks; `peers` is sorted by rank."""

    prefix: int
    peers: list[TunnelPeerConfig]


class WorkConfig(ConfigRecord):
    """The work of this rank, which the control plane returns for the claim. The corresponding class
    of the server is `domain.messages.Assignment`.
    """

    job: str
    job_id: str
    project: str
    attempt: int
    nodes: int = 1
    addresses: list[str]
    master_port: int = 29500
    accelerators_per_node: int = 0
    run: str
    gang_key: str = ""
    setup: str | None
    setup_key: str | None
    # the parts of the working folder that the setup may use; None: all of it
    setup_uses: list[str] | None
    image: str | None
    image_login: str | None  # USER:PASSWORD
    build: BuildConfig | None
    check: CheckConfig | None
    env: dict[str, str]
    secrets: dict[str, str]
    params: dict[str, str]
    workdir: WorkdirConfig | None
    git: GitConfig | None
    checkpoint: CheckpointConfig | None
    inputs: list[TransferConfig]
    outputs: list[TransferConfig]
    volumes: list[VolumeConfig]
    grace_s: float = 10
    keep_s: float = 0  # seconds that the agent waits for another job's work after this work ends
    machine: bool  # whether the agent waits for other work also after a stop or a failed setup
    # whether the work serves requests, and therefore continues after a notice as long as possible
    serves: bool
    idle_s: float | None
    # GPU utilization below which the work counts as idle; 0 if GPU utilization is ignored
    idle_gpu_percent: float = 0
    log_limit_mib: int = 1024
    # seconds of the server's silence after which the results of ended work are stored in the
    # bucket. 0 if there is no bucket.
    deposit_after_s: float = 0
    path: str = ""  # PATH of the submitting shell, if that shell is on this machine
    tunnel: TunnelConfig | None

    def __init__(self, fields: ConfigFields) -> None:
        super().__init__(fields)
        self.addresses = self.addresses or ["127.0.0.1"]
        self.streams = [at for at, each in enumerate(self.inputs) if each.mode == "stream"]
        # outputs that are also sent while the work runs, with their intervals in seconds
        self.mirrored = {
            at: each.every_s for at, each in enumerate(self.outputs) if each.every_s is not None
        }


def read_config(path: str) -> AgentConfig:
    """Read the agent's configuration file. Raises BadConfig, OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            raw = json.load(file)
        except ValueError as error:
            raise BadConfig(f"{path} is not JSON: {error}") from error
    return AgentConfig(ConfigFields(raw, "configuration"))
