"""A check that all providers of managed notebooks share."""

from cavvy.domain.tasks import TaskSpec
from cavvy.providers.objections import list_objections, refuses_all
from cavvy.providers.vm.provider import VmProvider


def check_only_sessions(provider: VmProvider) -> None:
    """The provider runs sessions, and objects to other tasks with what to do."""
    assert list_objections(TaskSpec(name="x", run="true", session=True), provider) == []
    assert refuses_all(provider) == ""
    (objection,) = list_objections(TaskSpec(name="x", run="true"), provider)
    assert "start one with `cavvy dev`" in objection.reason
