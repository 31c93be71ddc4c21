"""Encrypts the traffic between the ranks of a gang with WireGuard. The private key is created
on the node and never leaves the node; the public key is sent to the control plane with the claim.

The kernel's WireGuard is used if the kernel supports it, otherwise the program wireguard-go. No
work runs without the tunnel: if a requirement is missing, the attempt ends and the attempt's reason
names the missing requirement.
"""

from __future__ import annotations

import os
import time
import zlib
from contextlib import suppress

from .disk import write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import AgentConfig
    from .documents import TunnelConfig, WorkConfig

_NET_ADMIN = 1 << 12  # the bit of CAP_NET_ADMIN in /proc/self/status
_COMMAND_S = 20.0
_HANDSHAKE_S = 90.0  # seconds in which WireGuard itself repeats a handshake
_DISCARD = 9  # the port of a datagram that only starts a handshake
# Variables that make libraries use only the tunnel, not networks that bypass the tunnel, such as
# InfiniBand.
_ONLY_TCP = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "UCX_TLS": "tcp,self,sm"}
_INTERFACE = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
)


class TunnelFailed(Exception):
    """Raised if the tunnel cannot be used; the message says why."""


class TunnelOffer:
    """The facts about WireGuard that this node reports to the control plane when the node claims a
    rank.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._facts: dict[str, str] | None = None

    def facts(self) -> dict[str, str]:
        """Return the public key of this rank, or the software that the node lacks."""
        if self._facts is None:
            try:
                missing = find_missing()
                self._facts = (
                    {"tunnel_missing": missing} if missing else {"tunnel_key": self._make_key()}
                )
            except (TunnelFailed, OSError) as error:
                self._facts = {"tunnel_missing": str(error)}
        return self._facts

    def _make_key(self) -> str:
        path = _key_path(self._folder)
        if not os.path.exists(path):
            write_whole(path, _run(["wg", "genkey"]))
        with open(path, encoding="ascii") as file:
            return _run(["wg", "pubkey"], file.read()).strip()


def find_missing() -> str:
    """Return the missing requirement of WireGuard on this node, or ""."""
    import shutil

    for program in ("ip", "wg"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed (packages iproute2, wireguard-tools)"
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        held = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    if not int(held, 16) & _NET_ADMIN:
        return (
            "the agent has no permission to configure the network (it needs root or CAP_NET_ADMIN)"
        )
    return ""


def name_interface(config: AgentConfig) -> str:
    """Return the name of the tunnel's interface; the kernel permits 15 bytes."""
    return f"cvy{zlib.crc32(f'{config.gang}/{config.rank}'.encode()):08x}"


def open_tunnel(config: AgentConfig, tunnel: TunnelConfig) -> str:
    """Create the interface of this rank. Return why the interface cannot be created, or ""."""
    for rank, peer in enumerate(tunnel.peers):
        if not peer.key:
            missing = peer.missing or "the node's agent is too old"
            return f"`encrypt: true` needs WireGuard on each node; on rank {rank}, {missing}"
    name = name_interface(config)
    try:
        write_whole(config.private + "/tunnel.conf", _make_file(config, tunnel))
        _add_interface(name)
        _run(["wg", "setconf", name, config.private + "/tunnel.conf"])
        address = tunnel.peers[config.rank].address
        _run(["ip", "address", "add", f"{address}/{tunnel.prefix}", "dev", name])
        _run(["ip", "link", "set", name, "up"])
    except (TunnelFailed, OSError) as error:
        close_tunnel(config)
        return f"`encrypt: true` needs WireGuard, which cannot be used on this node: {error}"
    return ""


def close_tunnel(config: AgentConfig) -> None:
    """Remove the interface, if it exists."""
    path = config.private + "/tunnel.conf"
    if os.path.exists(path):
        with suppress(TunnelFailed, OSError):  # the interface was not made, or was removed already
            _run(["ip", "link", "delete", name_interface(config)])
        os.unlink(path)


def check_tunnel(config: AgentConfig, work: WorkConfig) -> None:
    """Wait for a handshake with the next rank, so that closed ports are reported before the work
    starts. Raises TunnelFailed, OSError.
    """
    import socket

    assert work.tunnel is not None
    rank = (config.rank + 1) % work.nodes
    peer, until = work.tunnel.peers[rank], time.monotonic() + _HANDSHAKE_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        while True:
            sender.sendto(b"", (peer.address, _DISCARD))
            time.sleep(0.2)
            text = _run(["wg", "show", name_interface(config), "latest-handshakes"])
            times = dict(line.split("\t") for line in text.splitlines())
            if times.get(peer.key, "0") != "0":
                return
            if time.monotonic() > until:
                raise TunnelFailed(
                    f"rank {rank} did not answer over WireGuard at {peer.endpoint} within "
                    f"{_HANDSHAKE_S:.0f} s: nodes of a task with `encrypt: true` must reach each "
                    "other over UDP on this port"
                )


def tunnel_variables(config: AgentConfig) -> dict[str, str]:
    """Return variables that make the work's libraries use the tunnel."""
    return {**_ONLY_TCP, **dict.fromkeys(_INTERFACE, name_interface(config))}


def _add_interface(name: str) -> None:
    try:
        _run(["ip", "link", "add", name, "type", "wireguard"])
    except TunnelFailed as error:
        import shutil

        if shutil.which("wireguard-go") is None:
            raise TunnelFailed(
                f"the kernel has no WireGuard ({error}), and wireguard-go is not installed"
            ) from error
        _run(["wireguard-go", name])


def _make_file(config: AgentConfig, tunnel: TunnelConfig) -> str:
    with open(_key_path(config.private), encoding="ascii") as file:
        private = file.read().strip()
    port = tunnel.peers[config.rank].endpoint.rpartition(":")[2]
    lines = ["[Interface]", f"PrivateKey = {private}", f"ListenPort = {port}"]
    for rank, peer in enumerate(tunnel.peers):
        if rank != config.rank:
            lines += ["[Peer]", f"PublicKey = {peer.key}", f"Endpoint = {peer.endpoint}"]
            lines.append(f"AllowedIPs = {peer.address}/32")
    return "\n".join(lines) + "\n"


def _key_path(folder: str) -> str:
    return folder + "/tunnel.key"


def _run(command: list[str], text: str = "") -> str:
    """Raises TunnelFailed, OSError."""
    import subprocess  # imported here, because few agents have WireGuard

    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TunnelFailed(f"`{command[0]}` did not end within {_COMMAND_S:.0f} s") from error
    if done.returncode:
        raise TunnelFailed(f"`{' '.join(command[:4])}`: {done.stderr.strip()}")
    return done.stdout
