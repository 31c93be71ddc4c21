"""What a server has for the reconcilers of capabilities, which find it in `ControlParts`."""

from cavvy.api.execs import JobExecs
from cavvy.api.peers import PeerServers
from cavvy.control.share import WorkShare
from cavvy.domain.values import Struct
from cavvy.server.state_dir import StateDir
from cavvy.settings import Settings


class ServerParts(Struct, frozen=True, kw_only=True):
    """What a server has besides its control plane."""

    home: StateDir  # the folder of this server
    files: StateDir  # the folder with keys, logs and uploads, which servers may share
    settings: Settings
    share: WorkShare | None  # None: it is the only server
    execs: JobExecs  # sessions with nodes
    peers: PeerServers  # the other servers
