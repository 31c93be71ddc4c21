"""Builds the configuration of each rank's agent on this machine, and lists the environment
variables that agents inherit.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cavvy import settings
from cavvy.agent.documents import AgentConfigFile
from cavvy.agent.work import mounts, protect
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, NoCapacity
from cavvy.providers.hosts.fleet.machines import list_shapes
from cavvy.providers.hosts.fleet.placing import AgentRoute, hold_devices, make_config
from cavvy.providers.hosts.machine import ThisMachine
from cavvy.providers.hosts.models import instance_type
from cavvy.providers.hosts.supervisor import service
from cavvy.providers.local.offers import PROVIDER, make_host

# The variables of the server's environment that agents inherit. Other variables may hold secrets.
KEPT = service.KEPT | {"CONTAINER_HOST"}

# Variables that name files and folders which the server's programs obey; several are lists.
_NAMING = (
    *(
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AZURE_CONFIG_DIR",
        "BASH_ENV",
        "CAVVY_CONFIG",
    ),
    *(
        "CLOUDSDK_CONFIG",
        "DOCKER_CONFIG",
        "ENV",
        "GIT_CONFIG_GLOBAL",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    *("KUBECONFIG", "LD_LIBRARY_PATH", "LD_PRELOAD", "NETRC", "OCI_CONFIG_FILE", "PIP_CONFIG_FILE"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONUSERBASE"),
    *("REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "UV_CONFIG_FILE", "XDG_CONFIG_HOME"),
    "ZDOTDIR",
)


def list_obeyed(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the files and folders that this server obeys: its settings, what they name, and what
    its environment names. Jobs must not be able to change them.

    Folders in which this server would look, but that do not exist, are created first, because jobs
    could otherwise create them.
    """
    _create_missing(environ)
    values = [environ.get(name, "") for name in _NAMING]
    named = {path for value in values for path in value.split(":") if path.startswith("/")}
    try:
        loaded = settings.load(environ)
    except settings.SettingsError:
        return sorted(named)
    tables = [loaded.values, *loaded.providers.values()]
    texts = [str(value) for table in tables for value in table.values()]
    files = {os.path.expanduser(text) for text in texts if text.startswith(("/", "~/"))}
    own = {str(loaded.file)}
    if loaded.file.parent.name == "cavvy":
        own.add(str(loaded.file.parent))
    return sorted(named | own | {each for each in files if os.path.isfile(each)})


def _create_missing(environ: Mapping[str, str]) -> None:
    paths = [each for each in environ.get("PATH", "").split(":") if each.startswith("/")]
    if not environ.get("CAVVY_CONFIG") and (base := environ.get("XDG_CONFIG_HOME", "")):
        paths.append(os.path.join(base, "cavvy"))
    homes = protect.list_homes()
    for path in map(os.path.normpath, dict.fromkeys(paths)):
        if path.startswith("/") and not _is_safe(path, homes):
            with suppress(OSError):  # where this server may create no folder, jobs may not
                os.makedirs(path, mode=0o700, exist_ok=True)


def _is_safe(path: str, homes: Sequence[str]) -> bool:
    """Return whether jobs can create nothing at `path`: it is in a folder of the system, or in an
    entry of a home folder that is missing or protected."""
    homes = [each for each in homes if mounts.contains(each, path) and each != path]
    if homes:
        name = os.path.relpath(path, homes[-1])
        entry = os.path.join(homes[-1], name.partition("/")[0])
        return not protect.is_free(name) or not os.path.exists(entry)
    return any(mounts.contains(each, path) for each in protect.SYSTEM)


def make_configs(
    gang: GangSpec,
    machine: ThisMachine,
    home: Path,
    hides: str = "",
    *,
    covers: bool = False,
    alone: bool = False,
    separates: bool = False,
    obeys: Sequence[str] = (),
) -> Sequence[AgentConfigFile]:
    """Return one configuration for each rank. `hides` is the path of a folder that the work must
    not be able to read, and `obeys` lists what it must not change. `covers` states whether this
    machine can use namespaces for both, and `alone` whether they also give the work its own
    processes. `separates` states whether the namespaces separate the work from all processes
    outside of the work. Raises NoCapacity if the offer or an allocation does not fit this machine.
    """
    host = make_host(machine)
    if gang.offer.provider != PROVIDER or gang.offer.region != machine.hostname:
        raise NoCapacity(
            f"{gang.offer.key}: this machine, which is now {host.name}, has no such offer"
        )
    if gang.offer.instance_type not in {instance_type(m) for m, _ in list_shapes(machine)}:
        raise NoCapacity(f"{gang.offer.instance_type}: this machine has no such accelerator")
    allocations = {allocation.rank: allocation for allocation in gang.allocations}
    route = AgentRoute(address=gang.agent_endpoint.address, token=gang.agent_endpoint.token)
    project = gang.labels.get("project", "")
    folder, cache = home / "gangs" / gang.name, str(home / "cache")
    private = home / "agents" / gang.name
    return [
        replace(
            make_config(
                gang,
                hold_devices(rank, allocations.get(rank), machine, "this machine", "127.0.0.1"),
                route,
                str(folder / str(rank)),
                cache,
                str(private / str(rank)),
            ),
            volumes=str(home / "volumes" / project) if project else "",
            hides=hides,
            covers=covers,
            alone=alone,
            obeys=list(obeys),
            separates=separates,
        )
        for rank in range(gang.nodes)
    ]
