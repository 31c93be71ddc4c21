"""Finds the reasons why a managed endpoint cannot run a service.

All managed endpoints have the same contract: the container answers POST /invocations and GET /ping
on port 8080. The provider's API forwards a request once the complete body has arrived.
"""

from collections.abc import Iterator, Mapping, Sequence

from cavvy.domain.services import ServiceSpec, TargetKind
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.providers.base import GangSpec

CALLED, PROBED, PORT = "/invocations", "/ping", 8080
_FROM_NODES = frozenset({TargetKind.GPU_UTILISATION, TargetKind.METRIC})


def object_to_endpoint(task: TaskSpec, title: str, docs: str) -> Sequence[Objection]:
    """Return the objections to a task that endpoints cannot run. `docs` is the provider's page
    about the contract of containers.
    """
    why = f"{title} run only the image, without Cavvy's agent ({docs})"
    given = (
        ("setup", task.setup, f"{why}; put it into the image"),
        ("workdir", task.workdir, f"{why}; put the files into the image"),
        ("secrets", task.secrets, f"{why}, and show the environment to all who may read the model"),
        ("outputs", task.outputs, why),
        ("checkpoint", task.checkpoint, why),
    )
    found = [Objection(field, reason) for field, value, reason in given if value]
    return found if task.service is None else [*found, *_list_unserved(task.service, title, docs)]


def object_to_program(
    task: TaskSpec,
    title: str,
    docs: str,
    starts: str = "starts the image with the argument `serve`",
) -> list[Objection]:
    """Return an objection if the service's field `run` is not `serve`. Such a service is
    impossible, because the provider always starts the image with the argument `serve`. `starts` is
    the text that says so.
    """
    if task.service is None or task.run.strip() == "serve":
        return []
    return [Objection("run", f"{title} {starts} ({docs}); write `run: serve`")]


def object_to_files(task: TaskSpec, reason: str, docs: str) -> list[Objection]:
    """Return the objection to inputs, for endpoints into which the provider copies no files."""
    if not task.inputs:
        return []
    why = f"{reason}; put the model into the image, or read it in the program ({docs})"
    return [Objection("inputs", why)]


def list_variables(gang: GangSpec) -> Mapping[str, str]:
    """Return the environment of a container. PORT is omitted, because an endpoint's container
    always listens on port 8080.
    """
    return {name: value for name, value in gang.env.items() if name != "PORT"}


def _list_unserved(spec: ServiceSpec, title: str, docs: str) -> Iterator[Objection]:
    if spec.port != PORT:
        yield Objection("service.port", f"{title} send requests to port {PORT} ({docs})")
    if spec.probe.path != PROBED or spec.probe.body is not None or spec.probe.headers:
        yield Objection("service.probe.path", f"{title} probe GET {PROBED} ({docs})")
    if spec.models:
        reason = f"{title} forward only POST {CALLED}, and no path of OpenAI's API ({docs})"
        yield Objection("service.models", reason)
    if spec.replicas.target.kind in _FROM_NODES:
        reason = (
            f"{title} forward only POST {CALLED}, so Cavvy can read no metrics on the node ({docs})"
        )
        yield Objection("service.replicas.target", reason)
    if any(each.path != CALLED for each in spec.events):
        yield Objection("service.events.path", f"{title} forward only POST {CALLED} ({docs})")
