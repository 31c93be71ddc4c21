"""The manifest of this provider; imports nothing that connects."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    HAS_PARTS,
    RELAYS_AGENTS,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import lost_setting, price_setting, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.SPOT: "hosts of your own are never taken away for a lower price, so there are no spot "
    "offers",
    Feature.VOLUMES: "hosts have no volumes to attach by name; give the `host` folder or the `nfs` "
    "export",
    Feature.NETWORK: "the network between your hosts is as it is; Cavvy neither measures nor makes "
    "one",
    Feature.DISK: "jobs share the disk that holds Cavvy's folder on a host; its type cannot be "
    "chosen",
    Feature.SELF_END: "an agent ends its work when its lease is over, but the host stays on",
    Feature.CAPACITY: "what is free is known from the jobs that hold it, not from the hosts",
    Feature.NOTICE: "nothing tells beforehand that a host goes down",
}

MANIFEST = Manifest(
    name="ssh",
    title="hosts reached by SSH",
    docs="docs/guides/ssh-hosts.md",
    unsupported=UNSUPPORTED,
    abilities=(
        HAS_PARTS,
        SHARES_HOSTS,
        SIGNALS_CHANGES,
        RELAYS_AGENTS,
        CHECKS_TASKS,
        WHO_AM_I,
        CLOSEABLE,
    ),
    visibility_delay=timedelta(0),
    settings=(
        text(
            "hosts",
            "Names or addresses of hosts, with commas or blanks between them; `gpu-*` "
            "means every such "
            "`Host` of the SSH configuration. Each is reached as `ssh NAME` would reach it.",
        ),
        text(
            "inventory",
            "A TOML file of hosts and groups with their prices, beside or instead of "
            "`hosts`. "
            "A relative path is one in `~/.config/cavvy`.",
        ),
        text(
            "ssh_config",
            "This OpenSSH client configuration is read: HostName, User, Port, "
            "IdentityFile, ProxyJump, ...",
            "~/.ssh/config",
        ),
        text(
            "host_keys",
            "`strict` refuses hosts whose key is not in known_hosts; `accept-new` "
            "trusts a host's key when "
            "it is first seen, and refuses a changed one.",
            "strict",
        ),
        price_setting("The inventory can say otherwise for groups and hosts. "),
        lost_setting(
            "A host that neither the server nor its neighbours reach for this long is taken "
            "for "
            "dead: its jobs are tried again elsewhere."
        ),
        text(
            "folder",
            "Agents, working folders and caches are kept there on each host.",
            "~/.cavvy-agent",
        ),
    ),
)
