"""Builds the work document that an agent receives with its granted claim.

Plans the encrypted tunnel between the ranks of a gang: addresses, ports and public keys.

Opens the secrets of jobs for the agents that start the jobs.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from ipaddress import IPv4Address, ip_address
from typing import Any, get_type_hints

from msgspec import convert

from cavvy.agent.documents import (
    PORT,
    PORT_USES,
    BuildConfig,
    CheckConfig,
    CheckpointConfig,
    GitConfig,
    TransferConfig,
    TunnelConfig,
    TunnelPeerConfig,
    WorkConfig,
    WorkdirConfig,
)
from cavvy.control.clock import ControlClock
from cavvy.control.decide.job_traces import write_traceparent
from cavvy.control.decide.losses import agents_wait
from cavvy.control.decide.rows import make_attempt_event
from cavvy.control.decide.warm_pool import FAREWELL, may_keep
from cavvy.domain.jobs import Attempt, JobRecord, Node
from cavvy.domain.messages import HostFacts
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ImageBuild, ResourceSpec, Scalar, TaskSpec, Transfer, Workdir
from cavvy.domain.values import replace
from cavvy.planner.device_rates import device_of
from cavvy.spec.uses import is_used
from cavvy.store.base import AtomicWrite, KeyUnusable
from cavvy.store.sql import Store

# The range of ports for ranks: below Linux's first ephemeral port (32768), and above the ports of
# common services.
_FIRST_PORT, _PORTS = 20000, 12000

# The fields of the work with the name of a field of the task, but with another value.
_MADE = {
    "project",
    "params",
    "nodes",
    "image",
    "image_login",
    "workdir",
    "env",
    "secrets",
    "inputs",
    "outputs",
    "checkpoint",
    "machine",
}
# The secrets with the keys of a storage, by the scheme of its URLs. Only keys of the project reach
# a node, never keys of the server.
MOUNT_KEYS = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "STORAGE_EMULATOR_HOST"),
    "az": (
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ENDPOINT",
    ),
}
_AS_STATED = {
    name: kind
    for name, kind in get_type_hints(WorkConfig).items()
    if name in TaskSpec.__struct_fields__ and name not in _MADE
}

# 198.18.0.0/15 is reserved for tests of networks (RFC 2544), so neither clouds nor the Internet use
# these addresses.
_FIRST, _BITS = int(IPv4Address("198.18.0.0")), 17
_KEY = re.compile(r"[A-Za-z0-9+/]{43}=")  # 32 bytes in base64
_ADDRESS = re.compile(r"[A-Za-z0-9.:-]+")

OpenSecrets = Callable[
    [str, Sequence[str]], Awaitable[dict[str, str]]
]  # (project, names) -> secret values


def make_assignment(
    job: JobRecord,
    attempt: Attempt,
    nodes: Sequence[Node],
    *,
    accelerators: int,
    secrets: Mapping[str, str],
    checkpoint: CheckpointConfig | None = None,
    manifest: bytes | None = None,
    losses_per_hour: float | None = None,
    deposit_after_s: float = 0,
    traced: bool = False,
    repairs: bool = False,
) -> WorkConfig:
    """Build the work of one attempt.

    `secrets` maps the names of secrets to their decrypted values. `checkpoint` describes where
    checkpoints are stored. `manifest` is the manifest of the working folder's snapshot, from which
    the key of a setup with `uses` is computed. `losses_per_hour` is the number of nodes that the
    whole gang is expected to lose per hour in its market. `deposit_after_s` is how many seconds an
    agent waits for the server before it stores results in a bucket. `traced` adds the
    trace context of the attempt. `repairs` means that the provider can replace a lost node.
    """
    task = job.task
    return replace(
        _make_bare(job, attempt, nodes, accelerators),
        **_list_as_stated(task),
        setup_key=setup_key(job, manifest),
        image=task.image if task.image_build is None else name_build(job, task.image_build),
        image_login=secrets.get(task.image_login) if task.image_login else None,
        build=convert(task.image_build, BuildConfig | None, from_attributes=True),
        check=_check(task.resources, attempt.offer),
        env={
            **({"TRACEPARENT": write_traceparent(job.id, attempt.number)} if traced else {}),
            **task.env,
            **_price(attempt),
            **_losses(losses_per_hour),
        },
        secrets={name: secrets[name] for name in task.secrets if name in secrets},
        inputs=[_give_keys(item, secrets) for item in task.inputs],
        params={name: _show(value) for name, value in task.params.items()},
        checkpoint=checkpoint,
        grace_s=task.grace.total_seconds(),
        keep_s=(task.keep + FAREWELL).total_seconds() if may_keep(task, attempt.offer) else 0,
        machine=task.on_kept_nodes,
        repair_s=agents_wait(task).total_seconds() if repairs else 0,
        idle_s=task.limits.idle.total_seconds() if task.limits.idle else None,
        idle_gpu_percent=task.limits.idle_gpu_percent,
        stuck_s=task.limits.stuck.total_seconds() if task.limits.stuck else None,
        deposit_after_s=deposit_after_s,
    )


def _list_as_stated(task: TaskSpec) -> dict[str, Any]:
    """Return the fields of the work whose values are those of the task's fields of this name."""
    return {
        name: convert(getattr(task, name), kind, from_attributes=True)
        for name, kind in _AS_STATED.items()
    }


def _make_bare(
    job: JobRecord, attempt: Attempt, nodes: Sequence[Node], accelerators: int
) -> WorkConfig:
    """Build the part of the work document that describes the job, its nodes, and the files to read
    and write. The setup, secrets and checkpoints are added later.
    """
    task, origin = job.task, job.origin
    port = _FIRST_PORT + zlib.crc32(attempt.id.encode()) % _PORTS
    tunnel = make_tunnel(attempt, nodes, port) if task.encrypt else None
    inside = None if tunnel is None else [peer.address for peer in tunnel.peers]
    return WorkConfig(
        job=job.name,
        job_id=job.id,
        project=job.project,
        attempt=attempt.number,
        nodes=attempt.nodes,
        addresses=inside or [node.address or "" for node in nodes],
        master_port=port,
        tunnel=tunnel,
        accelerators_per_node=accelerators,
        gang_key=_gang_key(nodes),
        run=task.run,
        workdir=WorkdirConfig(snapshot=origin.snapshot) if origin.snapshot else None,
        git=_git(task.workdir),
        outputs=[_transfer(item) for item in task.outputs],
        ports=_list_ports(task),
        serves=task.service is not None,
        path=origin.path if all(is_loopback(node.address or "") for node in nodes) else "",
    )


def _list_ports(task: TaskSpec) -> dict[str, int]:
    """Return the ports that a server chose for the program of a replica, by their variables."""
    if task.service is None:
        return {}
    names = set(PORT_USES) - ({PORT} if task.service.fixed_port else set())
    return {name: int(task.env[name]) for name in sorted(names) if task.env.get(name, "").isdigit()}


def _show(value: Scalar) -> str:
    """Return the value as agents show it to the work's programs."""
    return value if isinstance(value, str) else json.dumps(value)


def _check(need: ResourceSpec, offer: Offer) -> CheckConfig | None:
    """Return the minimum values that the node check requires on this offer: shares of the data
    sheet's memory bandwidth and of the requested network speed. A GPU that other jobs share is not
    checked, because the check takes all of its memory.
    """
    if need.check is None or (offer.shared and offer.accelerator_part < 1):
        return None
    share, network = need.check.share, need.network.min_mbps if need.network else None
    work = CheckConfig(share=share, link_mbps=need.check.link_mbps or share * (network or 0))
    device = (
        device_of(offer.accelerator, offer.accelerator_memory_mib or None)
        if offer.accelerator
        else None
    )
    if device is None:
        return work
    return replace(
        work,
        kind=device.name,
        memory_mib=device.memory_mib,
        bandwidth_gbs=device.bandwidth / 1e9,
    )


def _price(attempt: Attempt) -> dict[str, str]:
    """Return the variable with the price of the whole gang in dollars per hour, for cost-tracking
    programs. Return {} for a part of a shared host that costs money, because the part's price is
    unknown.
    """
    usd = attempt.offer.rate.times(attempt.nodes).usd
    return {"CAVVY_PRICE_USD_HR": str(usd)} if usd == 0 or not attempt.offer.shared else {}


def _losses(per_hour: float | None) -> dict[str, str]:
    """Return the variable with the gang's expected losses of nodes per hour, for programs that
    choose their own checkpoint interval."""
    return {} if per_hour is None else {"CAVVY_LOSSES_PER_HOUR": f"{per_hour:.6g}"}


def _gang_key(nodes: Sequence[Node]) -> str:
    """Return a secret that only the gang's ranks know, derived from the nonces of their claims."""
    claims = json.dumps(["gang", *(node.claim for node in nodes)])
    return hashlib.sha256(claims.encode()).hexdigest()


def setup_key(job: JobRecord, manifest: bytes | None = None) -> str | None:
    """Return a hash of everything that a setup can read. If two hashes are equal, a finished setup
    can be reused.

    If the task lists `uses` and the manifest is known, the hash covers only the files in `uses`;
    otherwise the hash covers the whole folder. The hash covers the parameters if the setup mentions
    their variables; `${{ params.x }}` is already replaced in the setup's text.
    """
    task = job.task
    if task.setup is None:
        return None
    params = _params(task) if names_params(task.setup) else None
    parts = [
        # the setup may have used the project's secrets, and other secrets could change the result
        job.project,
        task.setup,
        task.image or _plain(task.image_build),
        sorted(task.env.items()),
        sorted(task.secrets),
        params,
    ]
    folder: list[object] = [
        job.origin.snapshot,
        _plain(_git(task.workdir)),
        task.setup_uses,
    ]
    if task.setup_uses is not None and manifest is not None:
        folder = _used(manifest, task.setup_uses)
    return f"sha256-{hashlib.sha256(json.dumps([*parts, folder]).encode()).hexdigest()}"


def name_build(job: JobRecord, build: ImageBuild) -> str:
    """Return the image's name, which is the same on every node. Equal folders and Dockerfiles lead
    to the same name, so that each node builds an image only once.
    """
    parts = [job.origin.snapshot, _plain(_git(job.task.workdir)), _plain(build)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"localhost/cavvy-build:{digest[:32]}"


def _plain(part: ImageBuild | GitConfig | None) -> dict[str, Any] | None:
    """Convert the value to a dictionary, from which hashes are computed."""
    return None if part is None else asdict(part)


def names_params(setup: str) -> bool:
    """Return whether a setup gets the parameters as variables; the agent uses the same rule."""
    return "CAVVY_PARAM_" in setup


def _used(manifest: bytes, uses: Sequence[str]) -> list[object]:
    """Return the manifest's entries of `uses`: path, hash, mode and link target of each file."""
    files = json.loads(manifest)["files"]
    found = [
        (each["path"], each.get("sha256"), each.get("mode"), each.get("link"))
        for each in files
        if is_used(each["path"], uses)
    ]
    return ["uses", *sorted(found, key=lambda each: str(each[0]))]


def _params(task: TaskSpec) -> list[tuple[str, str]]:
    return sorted((name, repr(value)) for name, value in task.params.items())


def _git(workdir: Workdir | None) -> GitConfig | None:
    if workdir is None or workdir.git is None:
        return None
    return GitConfig(url=workdir.git, commit=workdir.commit or "HEAD")


def list_mount_keys(item: Transfer) -> tuple[str, ...]:
    """Return the names of the project's secrets that the program which mounts an input needs."""
    return MOUNT_KEYS[item.source.partition(":")[0]] if item.mount is not None else ()


def _give_keys(item: Transfer, secrets: Mapping[str, str]) -> TransferConfig:
    found = {name: secrets[name] for name in list_mount_keys(item) if name in secrets}
    return replace(_transfer(item), keys=found)


def _transfer(item: Transfer) -> TransferConfig:
    return TransferConfig(
        source=item.source,
        target=item.target,
        mode="stream" if item.stream else item.mount or "copy",
        writable=item.writable,
        every_s=item.every.total_seconds() if item.every is not None else None,
    )


def read_key(host: HostFacts) -> str:
    """Return the public key that a node has sent, or "" if the node has sent no valid key."""
    return host.tunnel_key if _KEY.fullmatch(host.tunnel_key) else ""


def make_tunnel(attempt: Attempt, nodes: Sequence[Node], master_port: int) -> TunnelConfig | None:
    """Return the tunnel of a gang. The result is None if all ranks are on one machine, because
    their traffic does not use a network. The addresses depend on the attempt, so that gangs on one
    machine rarely share addresses.
    """
    if len(nodes) < 2 or all(is_loopback(node.address or "") for node in nodes):
        return None
    bits = (len(nodes) + 1).bit_length()  # the first and the last address are not used
    block = zlib.crc32(f"tunnel {attempt.id}".encode()) % (1 << (_BITS - bits))
    first = _FIRST + (block << bits) + 1
    return TunnelConfig(
        prefix=32 - bits,
        peers=[
            TunnelPeerConfig(
                key=node.tunnel_key,
                missing=node.tunnel_missing,
                endpoint=_endpoint(node.address or "", master_port + 1 + node.rank),
                address=str(IPv4Address(first + node.rank)),
            )
            for node in nodes
        ],
    )


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _endpoint(address: str, port: int) -> str:
    """Return `address` and `port` as one text. An address that could add lines to a configuration
    is replaced by "invalid".
    """
    host = address if _ADDRESS.fullmatch(address) else "invalid"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class WorkSecrets:
    """Opens secrets with `open_secrets`. While a key of a job's secrets cannot be used, the job's
    nodes wait and cost money, so an event of the job says why.
    """

    def __init__(self, store: Store, clock: ControlClock, open_secrets: OpenSecrets) -> None:
        self._store, self._clock, self._open = store, clock, open_secrets
        self._waiting: set[str] = set()  # attempts with such an event; their agents ask repeatedly

    async def open(self, job: JobRecord, attempt: Attempt) -> Mapping[str, str]:
        """Return the values of the secrets that the job uses. Raises KeyUnusable if a secret cannot
        be decrypted now.
        """
        names = [*job.task.secrets, *([job.task.image_login] if job.task.image_login else [])]
        names += {name for each in job.task.inputs for name in list_mount_keys(each)}
        try:
            opened = await self._open(job.project, names) if names else {}
        except KeyUnusable as error:
            await self._explain(attempt, str(error))
            raise
        self._waiting.discard(attempt.id)
        return opened

    async def _explain(self, attempt: Attempt, why: str) -> None:
        if attempt.id in self._waiting:
            return
        self._waiting.add(attempt.id)
        text = f"the work waits, because {why}"
        event = make_attempt_event(attempt, self._clock.now(), "secrets", text)
        await self._store.commit(AtomicWrite(events=[event]))
