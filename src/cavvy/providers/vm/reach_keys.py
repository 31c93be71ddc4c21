"""Connects to machines by SSH with the key pair that all servers of the installation share. A
machine's host key is trusted at the first login, and every later login requires this key.
"""

import json
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.values import Struct
from cavvy.providers.base import TryAgain
from cavvy.providers.hosts.connection import (
    OPEN_TIMEOUT_S,
    CannotConnect,
    HostAddress,
    HostConnection,
    open_connection,
    write_rules,
)
from cavvy.providers.hosts.records import write_bytes
from cavvy.providers.hosts.ssh_link import SshRoute
from cavvy.providers.state import ProviderState
from cavvy.providers.vm.cloud import SshTarget

_COLLECTION, _NAME = "ssh-keys", "installation"
# A user or an address from a cloud is used in a configuration file and in commands, so it must not
# contain line breaks or look like an option.
_PLAIN = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:-]*")
# The user's own SSH configuration is not used, because Cavvy made the machines and the key.
_CONFIG = """\
{rules}HostKeyAlias {alias}
GlobalKnownHostsFile /dev/null
IdentityFile "{key}"
IdentitiesOnly yes
IdentityAgent none
User {user}
Port {port}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A key pair in the formats of OpenSSH."""

    private: str = field(repr=False)
    public: str


async def load_keys(state: ProviderState) -> KeyPair:
    """Return the installation's key pair. The first call creates and stores the key pair. Raises
    TryAgain."""
    for _ in range(2):
        for document in await state.read(_COLLECTION, _NAME):
            return KeyPair(**json.loads(document.body))
        made = _make_keys()
        body = json.dumps({"private": made.private, "public": made.public})
        await state.swap(ProviderDocument(collection=_COLLECTION, name=_NAME, body=body, version=1))
    raise TryAgain("the SSH key of this installation could not be stored")


def _make_keys() -> KeyPair:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return KeyPair(private=private.decode(), public=f"{public.decode()} cavvy")


class MachineDoor(Struct, frozen=True, kw_only=True):
    """Connects to one machine. `read_pin` returns the line of `known_hosts` that was recorded at
    the first login, or ""; `keep_pin` records this line.
    """

    alias: str  # the machine's name in messages, in file names and in `known_hosts`
    target: SshTarget
    sockets: Path  # a folder with a short path
    read_pin: Callable[[], str]
    keep_pin: Callable[[str], Awaitable[None]]
    read_keys: Callable[[], Awaitable[KeyPair]]

    async def dial(self) -> tuple[HostConnection, SshRoute]:
        """Connect to the machine. Raises CannotConnect, LoginRefused, TryAgain."""
        self._check_target()
        key, known = self.sockets / "key", self.sockets / f"{self.alias}.hosts"
        config, pin = self.sockets / f"{self.alias}.config", self.read_pin()
        write_bytes(key, (await self.read_keys()).private.encode())
        if pin:
            write_bytes(known, f"{pin}\n".encode())
        else:
            # Without a login, the key may be that of a machine which had this address before.
            known.unlink(missing_ok=True)
        rules = write_rules("yes" if pin else "accept-new", [str(known)])
        text = _CONFIG.format(
            rules=rules,
            alias=self.alias,
            key=key,
            user=self.target.user,
            port=self.target.port,
        )
        write_bytes(config, text.encode())
        address = HostAddress(
            name=self.alias,
            ours=True,
            ssh=["ssh", "-T", "-F", str(config)],
            destination=self.target.address,
            control=self.sockets / os.urandom(4).hex(),
        )
        link = await open_connection(address, timeout_s=OPEN_TIMEOUT_S)
        try:
            if not pin and known.exists() and (seen := known.read_text().strip()):
                await self.keep_pin(seen)
        except BaseException:
            link.close()
            await link.closed()
            raise
        return link, SshRoute(address=self.target.address, port=self.target.port)

    def _check_target(self) -> None:
        for word in (self.target.user, self.target.address):
            if not _PLAIN.fullmatch(word):
                raise CannotConnect(
                    f"{self.alias}: the cloud reported an unusual user or address: {word[:100]!r}"
                )
