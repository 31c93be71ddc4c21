"""Hosts reached by SSH: jobs use their CPUs, memory and accelerators; agents are processes."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    HAS_PARTS,
    HOLDS_VOLUMES,
    KEEPS_FOLDERS,
    RELAYS_AGENTS,
    REPLACES_NODES,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import isolation_setting, lost_setting, price_setting, text

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.SPOT: "your own hosts have no cheaper preemptible capacity, so there are no spot "
    "offers",
    Feature.NETWORK: "Cavvy neither measures nor configures the network between your hosts",
    Feature.DISK: "jobs share the disk that holds Cavvy's folder on a host; the type of the disk "
    "cannot be chosen",
    Feature.SELF_END: "an agent ends its work when its lease is over, but the host stays on",
    Feature.CAPACITY: "free capacity is derived from the jobs' allocations, not reported by the "
    "hosts",
    Feature.NOTICE: "hosts give no notice before they shut down",
}

MANIFEST = Manifest(
    name="ssh",
    title="hosts reached by SSH",
    cloud="cavvy.providers.ssh.provider:SshProvider",
    no_project_accounts="the hosts and their SSH keys are files of the server's owner, and SSH "
    "configurations can start programs",
    unsupported=UNSUPPORTED,
    abilities=(
        HAS_PARTS,
        SHARES_HOSTS,
        HOLDS_VOLUMES,
        KEEPS_FOLDERS,
        SIGNALS_CHANGES,
        RELAYS_AGENTS,
        CHECKS_TASKS,
        WHO_AM_I,
        REPLACES_NODES,
        CLOSEABLE,
    ),
    makes_volumes=True,
    visibility_delay=timedelta(0),
    docs="docs/guides/ssh-hosts.md",
    settings=(
        isolation_setting(),
        text(
            "hosts",
            "Names or addresses of hosts, separated by commas or blanks; `gpu-*` means every "
            "matching `Host` of the SSH configuration. Cavvy connects to each host as `ssh NAME` "
            "does.",
        ).for_setup(),
        text(
            "inventory",
            "A TOML file of hosts and groups with their prices, in addition to or instead of "
            "`hosts`. A relative path is relative to `~/.config/cavvy`.",
        ),
        text(
            "ssh_config",
            "The OpenSSH client configuration to read: HostName, User, Port, "
            "IdentityFile, ProxyJump, ...",
            "~/.ssh/config",
        ),
        text(
            "host_keys",
            "`strict` refuses hosts whose key is not in known_hosts; `accept-new` trusts the "
            "key of a new host at first contact, and refuses a changed key.",
            "strict",
        ),
        price_setting("The inventory can override this setting for groups and hosts. "),
        lost_setting(
            "A host that neither the server nor another host reaches for this long counts as "
            "dead: its jobs are retried elsewhere."
        ),
        text(
            "folder",
            "The folder for agents, working folders and caches on each host.",
            "~/.cavvy-agent",
        ),
    ),
)
