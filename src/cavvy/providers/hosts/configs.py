"""The configuration of an agent on a single host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# If the server is silent for this many seconds after the work has ended, the agent exits. The
# agent's messages stay in its home folder on the host or in the shared folder, and the provider
# delivers them from there later.
LEAVES_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAgentConfig:
    """One rank's configuration, as documented in docs/concepts/agent-protocol.md."""

    protocol: int = 1
    gang: str
    rank: int
    address: str
    pin: str | None = None  # SHA-256 of the server's certificate, if the address is https
    token: str = field(repr=False)
    home: str
    private: str = ""
    cache: str
    own_cache: str = ""
    fresh_cache: str = ""
    hides: str = ""
    covers: bool | None = False  # None: the agent tests it
    alone: bool = False
    separates: bool = False
    obeys: Sequence[str] = ()
    lease_s: float
    grace_s: float
    leaves_after_s: float = LEAVES_AFTER_S
    devices: Sequence[str] = ()
    device_indices: Sequence[int] = ()
    vendor: str | None = None
    cpus: float | None = None
    memory_mib: int | None = None
    node_address: str = "127.0.0.1"
    # what the agent reports if the provider reclaims the node: `seconds` of notice and `source`
    taken: Mapping[str, str | float] | None = None
