"""Finds the reasons why a provider can never run a task, for the planner and the queue."""

from collections.abc import Mapping

from cavvy.domain.services import ReadinessProbe, ServiceSpec
from cavvy.domain.tasks import Objection, TaskSpec
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


def list_objections(task: TaskSpec, provider: Provider) -> list[Objection]:
    """Return the objections without duplicates, in this order: to work that is not a session, to
    features that the manifest lists as unsupported, to unknown options, and the provider's own
    objections. If the provider objects to an option that is also unknown, only the provider's
    objection is listed.
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
    return list(dict.fromkeys([*work, *refusals(task, unsupported), *unknown, *own]))


def list_unlisted(providers: Mapping[str, Provider]) -> frozenset[str]:
    """Return the providers whose volumes exist before a task names them, and that do not report
    where."""
    return frozenset(
        name
        for name, provider in providers.items()
        if not provider.manifest.makes_volumes
        and Feature.VOLUMES not in provider.manifest.unsupported
        and ability(provider, HOLDS_VOLUMES) is None
    )


def list_makers(providers: Mapping[str, Provider]) -> frozenset[str]:
    """Return the providers that make a volume of a task that states no size."""
    return frozenset(
        name for name, provider in providers.items() if provider.manifest.makes_volumes
    )


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
