"""The parts of a manifest that all clouds with a `VmProvider` share. This module imports nothing
that calls a cloud, so that a manifest can be read without it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict, Unpack

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    HAS_PARTS,
    RELAYS_AGENTS,
    REPLACES_NODES,
    WHO_AM_I,
)
from cavvy.providers.base import Ability, Feature, Manifest, ProviderSetting, explain_results
from cavvy.providers.settings import exchange_rate, flag, text

REST_LAYER = "cavvy.providers.vm.account:make_provider"
# of clouds that start the nodes of a gang together, as one object
TOGETHER = (CHECKS_TASKS, WHO_AM_I, RELAYS_AGENTS, CLOSEABLE)
ABILITIES = (*TOGETHER, REPLACES_NODES)  # of clouds with a machine for each node

# why most clouds lack a feature, with the cloud's page about it
_REASONS = {
    Feature.SPOT: "the API has no spot option for {machine} ({page})",
    Feature.VOLUMES: "volumes and shared file systems cannot be attached yet; copy data from and "
    "to a bucket instead ({page})",
    Feature.NETWORK: "the API neither reports nor selects the network of {machine} ({page})",
    Feature.DISK: "the size of the disk depends on the type of {machine} ({page})",
    Feature.SELF_END: "{title} bills {machine} until the API deletes it ({page}). Nodes get no API "
    "key, because a key may delete all machines; the server deletes machines that are off",
    Feature.CAPACITY: "the API reports which types a region has, but not how many machines are "
    "free ({page})",
    Feature.NOTICE: "the API describes no notice before {machine} is reclaimed ({page})",
}


class ManifestFields(TypedDict, total=False):
    """Fields of `Manifest` that `make_manifest` passes on as they are."""

    cloud: str
    layer: str  # the default is for clouds with a `RestAccount`
    docs: str  # the default is `docs/guides/NAME.md`
    project_key: str
    options: Mapping[str, str]
    no_quotas: str


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
    currency: str = "USD",
    zoned: bool = False,
    more_abilities: Sequence[Ability[Any]] = (),
    **fields: Unpack[ManifestFields],
) -> Manifest:
    """Return the manifest of a cloud that has a REST API at `endpoint` and deletes a machine's
    disks with the machine. `machine` is the cloud's word for a machine, with an article, such as
    "an instance". A reason in `unsupported` that is only the address of a page gets the words that
    fit most clouds. `deletion` is the cloud's page about the objects that are deleted with a
    machine. Among the settings for a project's own account, only `key_file` is a credential; this
    file contains only keys. `currency` is the currency of the API's prices. If it is not USD, the
    manifest gets the setting `usd_per_CURRENCY`, and `RestAccount.rate` converts prices. `zoned`
    is True if the cloud asks several zones, for example with `RestAccount.ask_zones`.
    """
    converts = [] if currency == "USD" else [exchange_rate(currency)]
    passed: ManifestFields = {"layer": REST_LAYER, "docs": f"docs/guides/{name}.md", **fields}
    together = Feature.GANG in unsupported or Feature.REPAIR in unsupported
    return Manifest(
        name=name,
        title=title,
        abilities=(
            *(TOGETHER if together else ABILITIES),
            *([HAS_PARTS] if zoned else []),
            *more_abilities,
        ),
        visibility_delay=timedelta(minutes=1),
        rights=rights,
        unsupported=_explain_unsupported(title, machine, deletion, unsupported),
        settings=(*settings, *converts, text("endpoint", endpoint_consequence, endpoint)),
        **passed,
    )


def _explain_unsupported(
    title: str, machine: str, deletion: str, unsupported: Mapping[Feature, str]
) -> Mapping[Feature, str]:
    """Return the reasons, with the words that fit most clouds for those that are only a page, and
    with the reason why machines keep no results."""
    found = {
        feature: _REASONS[feature].format(machine=machine, title=title, page=page)
        if page.startswith("https://") and feature in _REASONS
        else page
        for feature, page in unsupported.items()
    }
    waits = f"the {machine.split(maxsplit=1)[1]}"
    results = explain_results(f"{machine} loses its disk when it ends ({deletion})", waits)
    return {**found, Feature.RESULTS: results}


def reach_setting() -> ProviderSetting:
    """Return the setting `reach_by_ssh`. With this setting, the server connects to machines by SSH
    although the cloud supports user data.
    """
    return flag(
        "reach_by_ssh",
        "The server connects to the machines by SSH and starts the agents, which communicate "
        "with the server through these connections. With this setting, machines need no route to "
        "the server, and `server.tls_listen` need not be set. By default, the machines connect to "
        "the server.",
    )
