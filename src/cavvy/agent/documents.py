"""The documents that the agent reads: its configuration file, and the work that it receives with
the claim. `config.py` reads them from JSON; servers make and encode them. Each document is defined
only here, as are the words by which both sides state the size of files.

A new field of a document needs a mark: `since` if an older agent would leave a part of the work
undone, `harmless` otherwise.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING or __name__.startswith("cavvy."):  # on servers
    from collections.abc import Callable
    from dataclasses import dataclass, field
    from typing import Any

    TextLists = dict[str, list[str]]
else:  # On nodes, importing `dataclasses` and making the classes would take half of the start time.

    def dataclass(**_options):
        return lambda record: record

    def field(default=None, **_options):
        return default


# The version of the agent protocol, and the earlier versions that introduced features.
PROTOCOL, UPLOADED_CHECKPOINTS, EQUIPPED = 3, 2, 3


# If the server is silent for this many seconds after the work has ended, agents whose messages stay
# on a host or in a shared folder exit. The provider delivers the messages from there later.
LEAVES_AFTER_S = 60.0
PORT = "PORT"
# the variables with the ports of a service's program, and what the program does there
PORT_USES = {
    PORT: "requests",
    "CAVVY_EVENTS_PORT": "key-value events",
    "CAVVY_BOOTSTRAP_PORT": "the bootstrap server of prefill",
    "CAVVY_METRICS_PORT": "the router's metrics",
}


def since(version: int, what: str, used: Callable[[Any], bool] = bool) -> dict[str, Any]:
    """Return the metadata of a field that agents have supported since protocol `version`. An older
    agent would do the work as if the field were not set, so servers refuse it if `used` returns
    True for the field's value. `what` names the feature for users.
    """
    return {"since": version, "what": what, "used": used}


def harmless(why: str) -> dict[str, str]:
    """Return the metadata of a field that older agents may ignore, and the reason."""
    return {"harmless": why}


@dataclass(frozen=True, kw_only=True)
class ReclaimSignal:
    """How the agent learns that the provider reclaims the node. A SIGTERM to the agent means this,
    except if the file `unless` exists. Before the SIGTERM, the provider can warn the agent: it
    creates the file `warning`, or sends the signal `signal`.
    """

    source: str
    seconds: float  # grace period in seconds, between SIGTERM and SIGKILL
    # If this file exists, Cavvy has sent the SIGTERM, not the provider. None if Cavvy never sends
    # SIGTERM, but stops the agent by an order.
    unless: str | None = None
    warning: str | None = None
    signal: str | None = None  # a signal such as USR1
    warning_s: float = 0  # seconds from the warning until the node is reclaimed


@dataclass(frozen=True, kw_only=True)
class NoticeTokenConfig:
    """A token for the notice address. The agent fetches the token first and sends it with each
    request."""

    url: str
    header: str
    method: str = "PUT"
    headers: dict[str, str] = field(default_factory=dict)
    life_s: float = 21600


@dataclass(frozen=True, kw_only=True)
class NoticeHoldConfig:
    """The parameters of a long poll: a request that the server answers only after a change."""

    query: str  # {tag} is replaced by the ETag of the last answer
    first_tag: str
    longest_s: float


@dataclass(frozen=True, kw_only=True)
class NoticeNodeConfig:
    """How the agent learns which events concern this node: `url` returns the node's name, and
    `field` is the name of the field of an event that contains the names of nodes.
    """

    url: str
    field: str


@dataclass(frozen=True, kw_only=True)
class NoticeReplyConfig:
    """The request that acknowledges an event. The field `id` contains the name of a field of the
    event. The agent replaces the text {id} in `body` by the value of this field.
    """

    url: str
    body: str
    id: str


@dataclass(frozen=True, kw_only=True)
class NoticeAddress:
    """An address that the agent polls for reclaim notices, and the format of the responses."""

    source: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    token: NoticeTokenConfig | None = None
    every_s: float = 5
    hold: NoticeHoldConfig | None = None
    list: str | None = None
    match: TextLists = field(default_factory=dict)
    node: NoticeNodeConfig | None = None
    time: str | None = None
    within_s: float = 30
    advice: bool = False
    reply: NoticeReplyConfig | None = None


@dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """An order from the control plane to this agent, such as to stop the work."""

    seq: int
    kind: str
    seconds: float = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ExecConfig:
    """A command or session that a user requested."""

    id: str
    command: list[str] = field(default_factory=list)
    session: bool = False
    attached: bool = False  # whether the command ends when its user disconnects


@dataclass(kw_only=True)
class AgentConfigFile:
    """The configuration of one agent: its rank, the control plane's address, and the part of the
    machine that it may use. `home` is the rank's own folder, which the work can change. `private`
    holds the agent's records, and is hidden from the work where the agent can hide folders.
    """

    protocol: int = 1  # lowest protocol version that can read this file
    gang: str
    rank: int
    address: str
    token: str = field(repr=False)
    home: str
    private: str = ""  # "" means `home`
    pin: str = ""  # SHA-256 of the control plane's certificate, if it is self-signed
    cache: str = ""
    # The names of folders in `cache`: `own_cache` belongs to the work's project; work of other
    # projects has never seen `fresh_cache`, which is used if this machine cannot hide `hides`. If
    # a name is "", the work uses `cache` itself, or `own_cache` in place of `fresh_cache`.
    own_cache: str = ""
    fresh_cache: str = ""
    # the folder of the named volumes of the work's project on this machine; "": it has none
    volumes: str = ""
    hides: str = ""  # a folder that the work must not see, except this rank's parts of it
    # whether namespaces can hide the folder `hides` on this machine; None: the agent tests it
    covers: bool | None = None
    # whether `covers` also gives the work its own process namespace; tested with `covers`
    alone: bool = False
    # whether the work is also separated from all other processes of this user
    separates: bool = False
    # with `covers`, files and folders of the server that the work must not change
    obeys: list[str] = field(default_factory=list)
    lease_s: float = 21600
    grace_s: float = 10
    # After the work has ended, the agent exits if the server has been silent for this many seconds.
    # 0: the agent waits for the server without limit, because the provider deletes the rank's home
    # with the node.
    leaves_after_s: float = 0
    boxed: bool = False  # whether the node itself was started from the work's image
    devices: list[str] | None = None  # None means all GPUs of the node
    device_indices: list[int] = field(default_factory=list)
    # below 1, the work has only this part of its one device, and this much of the device's memory
    device_part: float = 1
    device_memory_mib: int = 0
    # the profile of the MIG instance that the agent makes on `devices`, which are slices of a GPU
    instance: str = ""
    vendor: str = ""
    memory_mib: int = 0
    node_address: str = "127.0.0.1"
    # the nodes' persistent folder, if its path here differs from the one in WorkConfig
    storage: str | None = None
    taken: ReclaimSignal | None = None
    notices: list[NoticeAddress] = field(default_factory=list)
    # full paths of inputs that the provider has placed on the node
    placed: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class CheckpointConfig:
    """The task's checkpoint folder, which outlives the work. If `storage` is set, `path` in the
    working folder is a link to `storage`.
    """

    path: str
    storage: str | None = None
    # whether the agent uploads checkpoints, because the nodes share no storage
    sync: bool = field(default=False, metadata=since(UPLOADED_CHECKPOINTS, "uploaded checkpoints"))
    every_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class VolumeConfig:
    """Files outside the working folder: their source, and the path where the work sees them."""

    kind: str  # one of named, host, nfs, folder
    source: str
    path: str
    read_only: bool = False
    options: str = ""
    # of a named volume: whether it outlives the gang
    keep: bool = field(default=True, metadata=harmless("other agents only find mounted volumes"))


_URL = since(EQUIPPED, "inputs or outputs at a URL", lambda end: "://" in end)


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """One input or output of the task. One of `source` and `target` is a path on this node, the
    other is a URL."""

    source: str = field(metadata=_URL)
    target: str = field(metadata=_URL)
    mode: str = field(  # of an input: copy, stream, mount or cached
        default="copy", metadata=since(EQUIPPED, "inputs as streams", lambda mode: mode != "copy")
    )
    # of an input that is mounted: whether the work may write, and the project's keys of the bucket
    writable: bool = field(
        default=False, metadata=harmless("the server refuses to let an old agent copy the input")
    )
    keys: dict[str, str] = field(
        default_factory=dict,
        repr=False,
        metadata=harmless("the server refuses to let an old agent copy the input"),
    )
    every_s: float | None = field(  # seconds between uploads of an output while the work runs
        default=None, metadata=since(EQUIPPED, "outputs that are sent while the work runs")
    )


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """A Dockerfile in the frozen working folder from which the image is built."""

    path: str
    dockerfile: str = "Dockerfile"
    target: str = ""
    args: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """The requirements of the node check: the memory of the GPU model, a minimum share of the
    model's memory bandwidth, and a minimum link speed.
    """

    share: float
    # minimum speed between two nodes; if 0, the speed is measured but not judged
    link_mbps: float = 0
    kind: str = ""  # the model of each GPU, or "" if it is unknown
    memory_mib: int = 0
    bandwidth_gbs: float = 0  # data-sheet bandwidth of the GPU's memory


@dataclass(frozen=True, kw_only=True)
class WorkdirConfig:
    """A snapshot of the working folder at submission. `snapshot` is the hash of the snapshot's
    manifest."""

    snapshot: str


@dataclass(frozen=True, kw_only=True)
class GitConfig:
    """A Git commit that is checked out as the working folder."""

    url: str
    commit: str = "HEAD"


@dataclass(frozen=True, kw_only=True)
class TunnelPeerConfig:
    """A rank in the tunnel: its public key or the software that it lacks, its address outside the
    tunnel, and its address inside the tunnel."""

    key: str
    endpoint: str
    address: str
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class TunnelConfig:
    """The encrypted tunnel between the ranks; `peers` is sorted by rank."""

    prefix: int
    peers: list[TunnelPeerConfig] = field(default_factory=list)


@dataclass(kw_only=True)
class WorkConfig:
    """The work of this rank, which the control plane returns for the claim. It contains decrypted
    secrets, so servers must not log or store it.
    """

    job: str
    job_id: str
    project: str
    attempt: int
    nodes: int = 1
    addresses: list[str] = field(default_factory=list)  # one per rank, in the order of the ranks
    master_port: int = 29500
    accelerators_per_node: int = 0
    run: str
    gang_key: str = field(  # a secret that only the gang's ranks share
        default="", repr=False, metadata=harmless("the ranks of a gang prove nothing to each other")
    )
    setup: str | None = None
    setup_key: str | None = None  # a node can reuse a finished setup that has the same key
    # the parts of the working folder that the setup may use; None: all of it
    setup_uses: list[str] | None = field(
        default=None, metadata=harmless("the setup sees the whole working folder")
    )
    image: str | None = None
    image_login: str | None = field(  # USER:PASSWORD for the image's registry
        default=None, repr=False, metadata=since(EQUIPPED, "an image's login")
    )
    build: BuildConfig | None = field(  # the built image is named `image`
        default=None, metadata=since(EQUIPPED, "images built from a Dockerfile")
    )
    check: CheckConfig | None = field(default=None, metadata=since(EQUIPPED, "a check of the node"))
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    params: dict[str, str] = field(default_factory=dict)
    workdir: WorkdirConfig | None = None
    git: GitConfig | None = None
    checkpoint: CheckpointConfig | None = None
    inputs: list[TransferConfig] = field(default_factory=list)
    outputs: list[TransferConfig] = field(default_factory=list)
    volumes: list[VolumeConfig] = field(default_factory=list, metadata=since(EQUIPPED, "volumes"))
    grace_s: float = 10
    # which processes get SIGTERM before the work must end: handlers, main or all
    notify: str = field(
        default="handlers", metadata=harmless("SIGTERM goes to the programs that handle it")
    )
    # seconds that the agent waits for another job's work after this work has ended
    keep_s: float = field(default=0, metadata=harmless("the agent exits when the work has ended"))
    # seconds that the agent waits for the work of the next attempt after this work was stopped or
    # has failed, since its gang may be repaired
    repair_s: float = field(
        default=0, metadata=harmless("the agent exits, and its gang is launched again")
    )
    # whether the agent waits for other work even after stopped work or a failed setup
    machine: bool = field(
        default=False, metadata=harmless("after a stop or a failed setup, the agent exits")
    )
    # the ports that the server chose for the program of a service, by their variables
    ports: dict[str, int] = field(
        default_factory=dict,
        metadata=harmless("another program can take them before their use"),
    )
    # whether the work answers requests; after a notice, it continues until it is stopped or its
    # grace period must begin
    serves: bool = field(default=False, metadata=harmless("after a notice, the work ends at once"))
    idle_s: float | None = None
    # the GPU use in percent below which the work is idle; 0 if GPU use does not count
    idle_gpu_percent: float = field(
        default=0, metadata=harmless("work with idle GPUs does not count as idle")
    )
    # for how long the work may make no progress, which the agent then reports
    stuck_s: float | None = field(default=None, metadata=harmless("a stuck job is not found"))
    log_limit_mib: int = 1024
    # after this many seconds without an answer from the server, the results of ended work are
    # uploaded to a bucket; 0 if there is no bucket
    deposit_after_s: float = field(
        default=0, metadata=harmless("the agent waits for the server until its lease ends")
    )
    # PATH of the submitting shell, if it is on the node's machine
    path: str = field(default="", metadata=harmless("programs are found by the node's own PATH"))
    tunnel: TunnelConfig | None = field(
        default=None, metadata=harmless("agents without tunnels send no key and are refused")
    )

    @property
    def streams(self) -> list[int]:
        """The numbers of the inputs that the work reads as streams."""
        return [at for at, each in enumerate(self.inputs) if each.mode == "stream"]

    @property
    def mounted(self) -> list[int]:
        """The numbers of the inputs whose buckets are mounted."""
        return [at for at, each in enumerate(self.inputs) if each.mode in ("mount", "cached")]

    @property
    def mirrored(self) -> dict[int, float]:
        """The outputs that are also sent while the work runs, with their intervals in seconds."""
        return {
            at: each.every_s for at, each in enumerate(self.outputs) if each.every_s is not None
        }


def say_files(files: int, size: float) -> str:
    """Return a number of files and bytes for people, such as "3 files, 1.5 GiB"."""
    return f"{files} file{'' if files == 1 else 's'}, {say_size(size)}"


def say_size(size: float) -> str:
    """Return a number of bytes for people, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
