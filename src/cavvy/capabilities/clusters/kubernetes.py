"""Serves pools as node groups to the cluster autoscaler of Kubernetes, by the protocol of its
external gRPC cloud provider:
https://github.com/kubernetes/autoscaler/tree/master/cluster-autoscaler/cloudprovider/externalgrpc

A pool is a node group with the pool's name as its ID. An instance is a node that the autoscaler has
ordered; its ID is the provider ID with which the node joins the cluster.
"""

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.capabilities.clusters.wire import ClusterNodeView, PoolShapeView
    from cavvy.client import ApiClient
    from cavvy.client.pool_wire import PoolView


_SERVICE = "clusterautoscaler.cloudprovider.v1.externalgrpc.CloudProvider"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "unix")
POOL_LABEL, GPU_LABEL = "cavvy/pool", "cavvy/gpu"
_RUNNING, _CREATING, _DELETING = 1, 2, 3  # InstanceStatus.InstanceState
_STATES = {"running": _RUNNING, "leaving": _DELETING}
_OTHER_ERROR = 99  # the class of an error that is not a lack of resources
_PODS = "110"  # the default of kubelet's maxPods
_USABLE = 92  # percent of a node's memory that pods can use at least
_MICROS, _HOUR_S = 1_000_000, 3600


@click.command("serve-kubernetes")
@click.argument("pools", metavar="POOL...", nargs=-1, required=True)
@project_option
@click.option(
    "--listen",
    default="127.0.0.1:8086",
    show_default=True,
    metavar="HOST:PORT",
    help="The address for the cluster autoscaler.",
)
@click.option("--cert", metavar="FILE", help="The certificate of this server.")
@click.option("--key", metavar="FILE", help="The key of the certificate.")
@click.option(
    "--cacert", metavar="FILE", help="The authority of the autoscaler's client certificate."
)
def serve(
    pools: tuple[str, ...],
    project: str,
    listen: str,
    cert: str | None,
    key: str | None,
    cacert: str | None,
) -> None:
    """Serve pools as node groups to the cluster autoscaler of Kubernetes.

    The autoscaler runs with `--cloud-provider=externalgrpc` and a `--cloud-config` that names this
    address, its own `cert` and `key`, and the `cacert` of this server. Both sides check the
    certificate of the other. The files of the pools need `join`.
    """
    from cavvy.cli.reach.session import ended_by_signals
    from cavvy.packages import extra_command

    try:
        import grpc
    except ImportError as error:
        hint = f"install it: {extra_command('kubernetes-autoscaler')}"
        raise CommandFailure("this command needs the package grpcio", hint) from error
    credentials = _read_credentials(grpc, listen, cert, key, cacert)
    with session() as client:
        groups = NodeGroups(client, project, pools)
        groups.check()
        # one worker, because a connection to the server belongs to one thread at a time
        server = grpc.server(ThreadPoolExecutor(max_workers=1))
        server.add_generic_rpc_handlers((_make_handler(grpc, groups),))
        try:
            if credentials is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise CommandFailure(f"cannot listen on {listen}: {error}") from error
        server.start()
        host = listen.rpartition(":")[0]
        click.echo(f"serving {', '.join(pools)} to the cluster autoscaler at {host}:{port}")
        with ended_by_signals():
            try:
                server.wait_for_termination()
            finally:
                server.stop(1).wait()


class GroupProblem(Exception):
    """Raised if a request cannot be carried out. `code` is the name of a gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AutoscaledNode(Struct, frozen=True, kw_only=True):
    """A node of the cluster, as the autoscaler describes it."""

    provider_id: str
    name: str
    labels: Mapping[str, str]


class NodeGroups:
    """Answers the requests of a cluster autoscaler. Requests and answers are protobuf messages."""

    def __init__(self, client: "ApiClient", project: str, pools: Sequence[str]) -> None:
        self._client = client
        self._project = project
        self._pools = pools

    def check(self) -> None:
        """Raise CommandFailure if the nodes of a pool do not join a cluster."""
        for name in self._pools:
            if not self._read_pool(name).join:
                raise CommandFailure(
                    f"pool {name} has no `join`, so its nodes do not join a cluster",
                    "write `join` into the pool's file, and apply it again",
                )

    def answer(self, method: str, request: bytes) -> bytes:
        """Return the answer to a request. Raises GroupProblem, ApiError, and ValueError if the
        request is no message."""
        methods: dict[str, Callable[[Mapping[int, list[int | bytes]]], bytes]] = {
            "NodeGroups": self._list_groups,
            "NodeGroupForNode": self._find_group,
            "NodeGroupTargetSize": self._count,
            "NodeGroupIncreaseSize": self._increase,
            "NodeGroupDecreaseTargetSize": self._decrease,
            "NodeGroupDeleteNodes": self._delete,
            "NodeGroupNodes": self._list_nodes,
            "NodeGroupTemplateNodeInfo": self._make_template,
            "PricingNodePrice": self._price,
            "GetAvailableGPUTypes": self._list_gpus,
            "GPULabel": lambda _: encode((1, GPU_LABEL)),
            # an answer without options means that the autoscaler uses its own
            "NodeGroupGetOptions": lambda _: b"",
            "Cleanup": lambda _: b"",
            "Refresh": lambda _: b"",
        }
        if method not in methods:
            raise GroupProblem("UNIMPLEMENTED", f"{method} is not supported")
        return methods[method](decode(request))

    def _list_groups(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        return encode(*((1, self._make_group(self._read_pool(name))) for name in self._pools))

    def _find_group(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        """Return the group of a node; other nodes have the group with the ID ""."""
        node = _read_node(read_all(ask, 1)[-1] if read_all(ask, 1) else b"")
        name = self._find_pool(node)
        return encode((1, b"" if name is None else self._make_group(self._read_pool(name))))

    def _count(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        return encode((1, len(self._read_nodes(self._name_group(ask, 1)))))

    def _increase(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        from cavvy.capabilities.clusters.wire import order_nodes

        name, more = self._name_group(ask, 2), read_int(ask, 1)
        pool, nodes = self._read_pool(name), self._read_nodes(name)
        if more <= 0:
            raise GroupProblem("INVALID_ARGUMENT", f"{more} is not a number of nodes to add")
        if len(nodes) + more > pool.max:
            most = f"pool {name} has {len(nodes)} nodes and may have {pool.max}"
            raise GroupProblem("OUT_OF_RANGE", f"{most}, so {more} more are too many")
        order_nodes(self._client, self._project, name, _make_names(name, more))
        return b""

    def _decrease(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        """Cancel orders for which no machine was found yet, the newest first."""
        name, fewer = self._name_group(ask, 2), -read_int(ask, 1)
        waiting = [each.name for each in self._read_nodes(name) if each.state == "waiting"]
        if fewer <= 0:
            raise GroupProblem("INVALID_ARGUMENT", "the size can only be decreased: delta is < 0")
        if fewer > len(waiting):
            told = f"only {len(waiting)} nodes of pool {name} are not started yet"
            raise GroupProblem("FAILED_PRECONDITION", f"{told}, so {fewer} cannot be cancelled")
        self._release(name, waiting[-fewer:])
        return b""

    def _delete(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        """Remove nodes. If one of them does not belong to the group, remove none."""
        name = self._name_group(ask, 2)
        members = {each.provider_id: each.name for each in self._read_nodes(name)}
        wanted = [_read_node(each) for each in read_all(ask, 1)]
        names = [members.get(each.provider_id, each.name) for each in wanted]
        if unknown := [each for each in names if each not in members.values()]:
            told = f"pool {name} has no node {', '.join(unknown)}"
            raise GroupProblem("NOT_FOUND", told)
        self._release(name, names)
        return b""

    def _list_nodes(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        nodes = self._read_nodes(self._name_group(ask, 1))
        return encode(*((1, _make_instance(each)) for each in nodes))

    def _make_template(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        """Return the node that the pool would add. Autoscalers before 1.33 read field 1, newer ones
        field 2, in the same encoding."""
        name = self._name_group(ask, 1)
        node = _make_node(name, self._read_shape(name))
        return encode((1, node), (2, node))

    def _price(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        """Return the price of a node for a time, in dollars. Autoscalers before 1.33 send the time
        in fields 2 and 3, newer ones in 4 and 5."""
        node = _read_node(read_all(ask, 1)[-1] if read_all(ask, 1) else b"")
        name = self._find_pool(node)
        if name is None:
            raise GroupProblem("NOT_FOUND", f"node {node.name} belongs to no pool")
        start, end = (_read_time(ask, *fields) for fields in ((4, 2), (5, 3)))
        rates = {each.provider_id: each.rate_micros_per_hour for each in self._read_nodes(name)}
        rate = rates.get(node.provider_id) or self._read_shape(name).rate_micros_per_hour
        return encode((1, rate / _MICROS * max(0.0, end - start) / _HOUR_S))

    def _list_gpus(self, ask: Mapping[int, list[int | bytes]]) -> bytes:
        kinds = {self._read_shape(each).labels.get(GPU_LABEL) for each in self._pools}
        return encode(*encode_map(1, {kind: b"" for kind in sorted(filter(None, kinds))}))

    # Pools

    def _name_group(self, ask: Mapping[int, list[int | bytes]], number: int) -> str:
        name = read_text(ask, number)
        if name not in self._pools:
            raise GroupProblem("NOT_FOUND", f"there is no node group {name!r}")
        return name

    def _find_pool(self, node: AutoscaledNode) -> str | None:
        """Return the pool of a node: by its provider ID or, before the node has one, by its name.
        A node of a template has only labels."""
        for name in self._pools:
            if node.provider_id.startswith(f"cavvy://{self._project}/{name}/"):
                return name
        if node.provider_id:
            return None
        for name in self._pools:
            if node.name in {each.name for each in self._read_nodes(name)}:
                return name
        label = node.labels.get(POOL_LABEL)
        return label if label in self._pools else None

    def _read_pool(self, name: str) -> "PoolView":
        from cavvy.client.pool_wire import read_pool

        return read_pool(self._client, self._project, name)

    def _read_nodes(self, name: str) -> "Sequence[ClusterNodeView]":
        from cavvy.capabilities.clusters.wire import list_cluster_nodes

        return list_cluster_nodes(self._client, self._project, name)

    def _read_shape(self, name: str) -> "PoolShapeView":
        from cavvy.capabilities.clusters.wire import read_shape

        return read_shape(self._client, self._project, name)

    def _release(self, name: str, nodes: Sequence[str]) -> None:
        from cavvy.capabilities.clusters.wire import release_nodes

        release_nodes(self._client, self._project, name, nodes)

    def _make_group(self, pool: "PoolView") -> bytes:
        debug = f"{pool.project}/{pool.name} ({pool.state}), {pool.min} to {pool.max} nodes"
        if pool.problem:
            debug += f": {pool.problem}"
        return encode((1, pool.name), (2, pool.min), (3, pool.max), (4, debug))


def _make_names(pool: str, count: int) -> Sequence[str]:
    """Return names that no node of the pool has had. A name is not used twice, because the object
    of a removed node may still exist in the cluster."""
    from cavvy.client.paths import make_key

    return [f"{pool}-{make_key()[-10:].lower()}" for _ in range(count)]


def _make_instance(node: "ClusterNodeView") -> bytes:
    """Return an instance. A node that has ended counts as one that could not be created, which
    makes the autoscaler delete it and try elsewhere."""
    status = [(1, _STATES.get(node.state, _CREATING))]
    if node.state == "ended":
        problem = encode((1, "ended"), (2, node.reason), (3, _OTHER_ERROR))
        return encode((1, node.provider_id), (2, encode(*status, (2, problem))))
    return encode((1, node.provider_id), (2, encode(*status)))


def _make_node(pool: str, shape: "PoolShapeView") -> bytes:
    """Return a Node of Kubernetes (k8s.io/api/core/v1/generated.proto) that is empty and ready."""
    name = f"{pool}-template"
    labels = {
        **shape.labels,
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "arm64" if shape.architecture == "arm64" else "amd64",
    }
    amounts = {"cpu": str(shape.cpus), "memory": f"{shape.memory_mib}Mi", "pods": _PODS}
    if shape.gpus:
        amounts[_name_resource(shape.gpu)] = str(shape.gpus)
    usable = {**amounts, "memory": f"{shape.memory_mib * _USABLE // 100}Mi"}
    metadata = encode((1, name), *encode_map(11, labels))
    status = encode(
        *encode_map(1, {key: encode((1, text)) for key, text in amounts.items()}),
        *encode_map(2, {key: encode((1, text)) for key, text in usable.items()}),
        (4, encode((1, "Ready"), (2, "True"))),
    )
    return encode((1, metadata), (2, b""), (3, status))


def _name_resource(gpu: str) -> str:
    """Return the resource name of the device plugin for these GPUs."""
    from cavvy.catalog.accelerators import Vendor, find_accelerator

    known = find_accelerator(gpu) if gpu else None
    names = {Vendor.AMD: "amd.com/gpu", Vendor.INTEL: "gpu.intel.com/i915"}
    return names.get(known.accelerator.vendor, "nvidia.com/gpu") if known else "nvidia.com/gpu"


def _read_node(data: bytes) -> AutoscaledNode:
    node = decode(data)
    return AutoscaledNode(
        provider_id=read_text(node, 1), name=read_text(node, 2), labels=read_map(node, 3)
    )


def _read_time(ask: Mapping[int, list[int | bytes]], *numbers: int) -> float:
    """Return the seconds of the first of these fields that is set, else 0."""
    for number in numbers:
        for each in read_all(ask, number):
            time = decode(each)
            return read_int(time, 1) + read_int(time, 2) / 1e9
    return 0.0


def _read_credentials(
    grpc: Any, listen: str, cert: str | None, key: str | None, cacert: str | None
) -> Any:
    """Return the credentials of the server, which require a certificate of the client. Without
    certificates, only this machine can be served."""
    files = {"--cert": cert, "--key": key, "--cacert": cacert}
    missing = [option for option, file in files.items() if file is None]
    if len(missing) == 3 and listen.rpartition(":")[0] in _LOOPBACK:
        return None
    if missing:
        hint = "everyone who reaches the address could start and remove nodes without certificates"
        raise CommandFailure(f"{', '.join(missing)} is missing", hint, 2)
    read = {}
    for option, file in files.items():
        try:
            read[option] = Path(str(file)).read_bytes()
        except OSError as error:
            raise CommandFailure(f"{option} {file}: {error.strerror}", exit_code=2) from error
    return grpc.ssl_server_credentials(
        [(read["--key"], read["--cert"])], read["--cacert"], require_client_auth=True
    )


def _make_handler(grpc: Any, groups: NodeGroups) -> Any:
    """Return what answers the calls of the service. Messages are passed as bytes."""
    from cavvy.client import ApiError

    turn = threading.Lock()

    def answer(method: str, request: bytes, context: Any) -> bytes:
        def refuse(code: str, message: str) -> NoReturn:
            context.abort(getattr(grpc.StatusCode, code), message)
            raise AssertionError  # `abort` does not return

        with turn:
            try:
                return groups.answer(method, request)
            except GroupProblem as problem:
                refuse(problem.code, str(problem))
            except ApiError as error:
                found = error.code.endswith("-not-found")
                refuse("NOT_FOUND" if found else "UNAVAILABLE", error.message)
            except ValueError as error:
                refuse("INVALID_ARGUMENT", f"the request is not a message of {method}: {error}")

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, call: Any) -> Any:
            service, _, method = call.method.removeprefix("/").partition("/")
            if service != _SERVICE:
                return None
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: answer(method, request, context)
            )

    return Handler()


# A whole number or boolean, a floating-point number, a string, or a message.
# Messages of protobuf without generated code; a message is a list of its fields:
# https://protobuf.dev/programming-guides/encoding/
FieldValue = int | float | str | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WORD = 1 << 64


def encode(*fields: tuple[int, FieldValue]) -> bytes:
    """Return a message with these fields. As in proto3, fields that have their default are left
    out, except messages."""
    return b"".join(
        _encode_field(number, value) for number, value in fields if value or value == b""
    )


def encode_map(number: int, entries: Mapping[str, FieldValue]) -> Iterator[tuple[int, bytes]]:
    """Return the fields of a map with string keys."""
    return ((number, encode((1, key), (2, value))) for key, value in entries.items())


def decode(data: bytes) -> dict[int, list[int | bytes]]:
    """Return the values of each field, by its number. Numbers of a fixed size are returned as their
    bytes. Raises ValueError."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        match tag & 7:
            case 0:
                value, at = _read_varint(data, at)
                found.setdefault(tag >> 3, []).append(value)
                continue
            case 2:
                size, at = _read_varint(data, at)
            case 1 | 5 as kind:
                size = 8 if kind == _FIXED64 else 4
            case kind:
                raise ValueError(f"unknown wire type {kind}")
        if at + size > len(data):
            raise ValueError("the message is cut off")
        found.setdefault(tag >> 3, []).append(data[at : at + size])
        at += size
    return found


def read_int(message: Mapping[int, list[int | bytes]], number: int) -> int:
    """Return a signed number, or 0 if the message has none."""
    value = next((each for each in message.get(number, [])[::-1] if isinstance(each, int)), 0)
    return value - _WORD if value >= _WORD >> 1 else value


def read_text(message: Mapping[int, list[int | bytes]], number: int) -> str:
    """Return a string, or "" if the message has none. Raises ValueError."""
    return next(iter(read_all(message, number)[::-1]), b"").decode()


def read_all(message: Mapping[int, list[int | bytes]], number: int) -> list[bytes]:
    """Return the messages or strings of a repeated field."""
    return [each for each in message.get(number, []) if isinstance(each, bytes)]


def read_map(message: Mapping[int, list[int | bytes]], number: int) -> dict[str, str]:
    """Return a map of strings. Raises ValueError."""
    entries: Iterable[dict[int, list[int | bytes]]] = map(decode, read_all(message, number))
    return {read_text(each, 1): read_text(each, 2) for each in entries}


def _encode_field(number: int, value: FieldValue) -> bytes:
    match value:
        case int():  # also a boolean
            return _varint(number << 3 | _VARINT) + _varint(value % _WORD)
        case float():
            return _varint(number << 3 | _FIXED64) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at >= len(data):
            raise ValueError("the message is cut off")
        value |= (data[at] & 0x7F) << (7 * place)
        at += 1
        if data[at - 1] < 0x80:
            return value % _WORD, at
    raise ValueError("a number is too long")
