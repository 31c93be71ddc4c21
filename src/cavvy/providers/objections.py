"""Finds the reasons why a provider can never run a task, for the planner and the queue."""

from collections.abc import Iterable

from cavvy.domain.offers import list_sellers
from cavvy.domain.services import ReadinessProbe, ServiceSpec
from cavvy.domain.tasks import Objection, TaskSpec, VolumeKind
from cavvy.providers.abilities import CHECKS_TASKS, HOLDS_VOLUMES, SHARES_HOSTS, ability
from cavvy.providers.base import Feature, Manifest, Provider
from cavvy.spec.problems import listed, nearest
from cavvy.spec.support import read_options, refusals


def refuses_all(provider: Provider) -> str:
    """Return the reason why the provider cannot run even a minimal task, or "" if the provider can
    run such a task.
    """
    reasons = list_objections(make_minimal_task(provider.manifest), provider)
    return reasons[0].reason if reasons else ""


def make_minimal_task(manifest: Manifest) -> TaskSpec:
    """Return a minimal task of a kind that the provider runs: program, session or service."""
    if manifest.only_services:
        service = ServiceSpec(port=8080, probe=ReadinessProbe(path="/ping"))
        return TaskSpec(name="check", run="serve", service=service)
    return TaskSpec(name="check", run="true", session=manifest.only_sessions)


def list_objections(
    task: TaskSpec, provider: Provider, configured: Iterable[Provider] = ()
) -> list[Objection]:
    """Return the objections without duplicates, in this order: to work that is not a session, to
    features that the manifest lists as unsupported, to unknown options, and the provider's own
    objections. If the provider objects to an option that is also unknown, only the provider's
    objection is listed. `configured` are all providers on which the task could run.
    """
    unsupported = {
        str(feature): reason for feature, reason in provider.manifest.unsupported.items()
    }
    checks = ability(provider, CHECKS_TASKS)
    own = checks.check(task) if checks else ()
    explained = {each.field for each in own}
    unknown = [
        each for each in _object_to_options(task, provider.manifest) if each.field not in explained
    ]
    work = [*_object_to_work(task, provider.manifest), *_object_to_topology(task, provider)]
    new = _object_to_new_volumes(task, provider, configured)
    return list(dict.fromkeys([*work, *refusals(task, unsupported), *unknown, *own, *new]))


def _object_to_new_volumes(
    task: TaskSpec, provider: Provider, configured: Iterable[Provider]
) -> list[Objection]:
    """Where the provider would make a volume that the task expects to exist, return the objection
    if another provider may have it but does not list its volumes (see `explain_misplaced` for those
    that do)."""
    names = [
        each.source
        for each in task.volumes
        if each.kind is VolumeKind.NAMED and each.keep and each.size_gib is None
    ]
    if not names or not provider.manifest.makes_volumes:
        return []
    named = list_sellers(task.resources.providers)
    holders = dict.fromkeys(
        other.manifest.title
        for other in configured
        if not (other.manifest.makes_volumes or Feature.VOLUMES in other.manifest.unsupported)
        and (not named or other.manifest.name in named)
        and ability(other, HOLDS_VOLUMES) is None
    )
    if not holders:
        return []
    reason = (
        f"{names[0]} may be a volume of {listed(holders, 'or')}; for a new one here, name only "
        f"`{provider.manifest.name}` in `resources.providers`, or state the volume's `size`"
    )
    return [Objection("volumes", reason)]


def _object_to_work(task: TaskSpec, manifest: Manifest) -> list[Objection]:
    """If the provider runs only sessions or only services, return the objection to a task of any
    other kind.
    """
    if manifest.only_services and task.service is None:
        reason = f"{manifest.title} run only services; start one with `cavvy serve`"
        return [Objection("run", reason)]
    if task.session or not manifest.only_sessions:
        return []
    reason = f"{manifest.title} run only interactive sessions; start one with `cavvy dev`"
    return [Objection("run", reason)]


def _object_to_topology(task: TaskSpec, provider: Provider) -> list[Objection]:
    """Return the objection to a required topology, if neither Cavvy nor the provider knows which
    nodes are close to each other."""
    if task.topology is None or task.topology.same is None:
        return []
    if provider.manifest.keeps_topology or ability(provider, SHARES_HOSTS) is not None:
        return []
    reason = (
        f"{provider.manifest.title} cannot tell which nodes are in one {task.topology.same}; write "
        "`prefer` instead of `same`, or name another provider"
    )
    return [Objection("topology.same", reason)]


def _object_to_options(task: TaskSpec, manifest: Manifest) -> list[Objection]:
    """Return an objection to each option that the manifest does not list. `Manifest.options` also
    contains options that only `cavvy export` reads, so that a task with such options can be
    exported and also run.
    """
    name, known = manifest.name, manifest.options
    found = []
    for option in read_options(task.resources, name):
        if option not in known:
            close = nearest(option, known)
            hint = f"did you mean `{close}`?" if close else _list_options(manifest)
            reason = f"{name} has no such option; {hint}"
            found.append(Objection(f"resources.options.{name}.{option}", reason))
    return found


def _list_options(manifest: Manifest) -> str:
    names = [f"`{each}`" for each in sorted(manifest.options)]
    return f"the options are {listed(names, 'and')}" if names else "the provider has no options"
