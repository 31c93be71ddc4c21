"""The parts of a manifest that all clouds on `VmProvider` share. This module imports nothing that
calls a cloud, so that manifests can import it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.providers.abilities import CHECKS_TASKS, CLOSEABLE, RELAYS_AGENTS, WHO_AM_I
from cavvy.providers.base import Feature, Manifest, ProviderSetting
from cavvy.providers.settings import flag, text

# the settings that a project may set for its own account, which are data for the cloud
_OF_PROJECTS = frozenset(
    (
        "bare_metal_profiles",
        "bid_percent",
        "client_id",
        "clouds",
        "community",
        "cpu_profiles",
        "cuda",
        "disk_gb",
        "disk_gib",
        "environments",
        "gpu_memory_gib",
        "gpu_vcpus",
        "image",
        "key_file",
        "network",
        "os",
        "prices",
        "project",
        "regions",
        "registry",
        "resource_group",
        "security_groups",
        "ssh_key",
        "ssh_keys",
        "subnet",
        "team",
        "template",
    )
)
ABILITIES = (CHECKS_TASKS, WHO_AM_I, RELAYS_AGENTS, CLOSEABLE)


def make_manifest(
    name: str,
    title: str,
    *,
    machine: str,
    deletion: str,
    rights: str,
    unsupported: Mapping[Feature, str],
    settings: Sequence[ProviderSetting],
    endpoint: str,
    endpoint_consequence: str = "The address of the API.",
    of_projects: bool = False,
) -> Manifest:
    """Return the manifest of a cloud with a REST API at `endpoint`, whose machines end with their
    disks. `machine` is the cloud's word for a machine, with its article; `deletion` is the cloud's
    page about the objects that are deleted with a machine; the guide is `guides/NAME.md`.
    `of_projects` states that projects may have their own accounts, because `key_file` is the only
    credential and contains only keys.
    """
    results = (
        f"{machine} loses its disk when it ends ({deletion}). If the server is unreachable when "
        "the work ends, the results are stored in the bucket in `checkpoint.storage` or "
        f"`server.results_url`; without a bucket, the {machine.split(maxsplit=1)[1]} waits until "
        "its lease ends"
    )
    return Manifest(
        name=name,
        title=title,
        docs=f"docs/guides/{name}.md",
        abilities=ABILITIES,
        visibility_delay=timedelta(minutes=1),
        rights=rights,
        unsupported={**unsupported, Feature.RESULTS: results},
        settings=(*settings, text("endpoint", endpoint_consequence, endpoint)),
        project_settings=tuple(
            each.name for each in settings if of_projects and each.name in _OF_PROJECTS
        ),
    )


def reach_setting() -> ProviderSetting:
    """Return the setting `reach_by_ssh`, which makes the server reach machines by SSH although the
    cloud supports user data.
    """
    return flag(
        "reach_by_ssh",
        "The server connects to the machines by SSH and starts the agents, which communicate "
        "with the server through these connections. Machines then need no route to the server, "
        "and `server.tls_listen` need not be set. By default, the machines connect to the server.",
    )
