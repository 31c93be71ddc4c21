"""Decides what maintenance of hosts means for their work: which hosts take no new work, and when
the work of a host that is drained must leave. The module does no I/O.

As in Kubernetes (https://kubernetes.io/docs/tasks/administer-cluster/safely-drain-node/), a host
is cordoned before its work leaves; as in Slurm (`scontrol update state=drain`), work that would be
lost may end first.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.allocations import Host
from cavvy.domain.maintenance import NodeState
from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.packing import HostIndex, choose_slices, name_of


class NodeWork(Struct, frozen=True, kw_only=True):
    """A gang on a host that is drained. The gang gets `notice` to end. `saves` means that its work
    runs and saves checkpoints, and `idle` that the gang is kept without work. A gang that is
    `leaving` has got its notice."""

    gang: str
    notice: timedelta
    saves: bool = False
    idle: bool = False
    leaving: bool = False


class DrainStep(Struct, frozen=True, kw_only=True):
    """The gangs that must leave now, each with the time at which its nodes are taken, the idle
    gangs to release, and when to decide again (None if nothing is left to decide)."""

    leave: Mapping[str, datetime]
    release: Sequence[str]
    again_at: datetime | None


def decide_drain(work: Sequence[NodeWork], by: datetime, now: datetime) -> DrainStep:
    """Decide which gangs leave a host that is to be free at the time `by`.

    Work that saves checkpoints leaves at once, because it loses nothing. Other work may end by
    itself until its notice must begin. Each gang gets its whole notice, so the host may be free
    later than `by`.
    """
    staying = [each for each in work if not each.leaving and not each.idle]
    latest = {each.gang: now if each.saves else by - each.notice for each in staying}
    return DrainStep(
        leave={each.gang: now + each.notice for each in staying if latest[each.gang] <= now},
        release=[each.gang for each in work if each.idle and not each.leaving],
        again_at=min((at for at in latest.values() if at > now), default=None),
    )


def find_sick(host: Host, state: NodeState | None) -> Mapping[str, str]:
    """Return the devices of the host on which no work is placed, with the reasons."""
    found = {**dict(host.sick), **(state.sick if state else {})}
    return {device: why for device, why in found.items() if device in host.devices}


def close_hosts(hosts: Sequence[Host], states: Mapping[str, NodeState]) -> Sequence[Host]:
    """Return the hosts as new work may use them: cordoned hosts are not ready, and the sick devices
    of the others are missing."""
    return [
        _close(host, states.get(host.name)) if host.sick or host.name in states else host
        for host in hosts
    ]


def _close(host: Host, state: NodeState | None) -> Host:
    if state is not None and (problem := state.describe()):
        return replace(host, ready=False, cordoned=True, problem=problem)
    sick = find_sick(host, state)
    if not sick:
        return host
    kept = [at for at, device in enumerate(host.devices) if device not in sick]
    return replace(
        host,
        devices=tuple(host.devices[at] for at in kept),
        kinds=tuple(host.kinds[at] for at in kept) if host.kinds else (),
        notes=(*host.notes, *(f"{device}: {why}" for device, why in sick.items())),
    )


def close_offers(
    offers: Sequence[Offer], hosts: Sequence[Host], changed: Collection[str]
) -> Sequence[Offer]:
    """Return the offers with the capacity that the hosts leave. `changed` are the hosts that accept
    less work than their provider states."""
    index = HostIndex(hosts)
    touched = {index.by_name[name].group for name in changed} - {""}
    found = []
    for offer in offers:
        name, group = name_of(offer), f"{offer.provider}/{offer.region}"
        if offer.shared and name in changed and not _fits(offer, index.by_name[name]):
            offer = replace(offer, capacity=0)
        elif offer.shared and name not in index.by_name and group in touched and offer.capacity:
            fitting = sum(_fits(offer, host) for host in index.find(offer))
            offer = replace(offer, capacity=min(offer.capacity, fitting))
        found.append(offer)
    return found


def _fits(offer: Offer, host: Host) -> bool:
    """Return whether the host is ready, and has enough devices of the offer's kind."""
    kinds = host.kinds or (offer.instance_type,) * len(host.devices)
    having = kinds.count(offer.instance_type) >= offer.accelerator_count
    return host.ready and (having or bool(choose_slices(offer.instance_type, host, ())))
