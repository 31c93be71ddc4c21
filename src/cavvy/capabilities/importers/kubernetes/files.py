"""Translates a file of Kubernetes: a Deployment or its like to a service, and a job to a job."""

from collections.abc import Sequence

from cavvy.capabilities.importers.dialects import Dialect
from cavvy.capabilities.importers.kubernetes.deployment import read_service_task
from cavvy.capabilities.importers.kubernetes.forms import check_forms
from cavvy.capabilities.importers.kubernetes.jobs import read_job
from cavvy.capabilities.importers.kubernetes.objects import (
    FoundService,
    JobObject,
    find_job,
    join_service,
    read_objects,
)
from cavvy.capabilities.importers.kubernetes.places import find_marks, place_keys
from cavvy.capabilities.importers.kubernetes.serving import (
    make_deployment,
    make_scaler,
    read_service,
)
from cavvy.capabilities.importers.own_rules import check_task
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.translation import Translation
from cavvy.spec.tree import Node


def translate(documents: Sequence[Node], notes: ProblemNotes) -> Translation:
    """Translate a file with one service, or with one job. Features that a service or a job does
    not support are refused.
    """
    found = _translate(documents, notes)
    return replace(found, kept=place_keys(found.kept, documents))


def _translate(documents: Sequence[Node], notes: ProblemNotes) -> Translation:
    kept_keys = TranslationNotes()
    check_forms(documents, notes)
    if len(notes):
        return Translation(kind=Dialect.KUBERNETES, what="file")
    if (job := find_job(documents, kept_keys)) is not None:
        return _translate_job(job, documents, notes, kept_keys)
    service = read_objects(documents, kept_keys)
    task = None
    if service is not None:
        try:
            task = _read_service(service, kept_keys)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            # This module checks only the values that it reads, not Kubernetes' own schema
            message = f"a value of this {service.kind} or of its Service, claims or autoscaler has "
            message += "a form that Kubernetes does not accept"
            hint = "`kubectl apply --dry-run=server -f FILE` names the value"
            notes.add(service.mark, message, suggestion=hint)
        if task is not None and not any(each.refused for each in kept_keys.list_kept()):
            check_task(task, find_marks(service.mark, documents), service.mark, notes)
    return Translation(
        kind=Dialect.KUBERNETES,
        what="file" if service is None else "service",
        tasks=() if task is None else (task,),
        kept=kept_keys.list_kept(),
    )


def _read_service(found: FoundService, kept_keys: TranslationNotes) -> TaskSpec | None:
    if found.kind == "Deployment":
        objects = join_service(found.mark, found.values, found.others)
        return read_service_task(objects, kept_keys)
    deployment = make_deployment(found.kind, found.mark, found.values, kept_keys)
    objects = join_service(found.mark, deployment, found.others)
    if found.kind == "InferenceService":
        objects = replace(objects, scaler=make_scaler(found.values, found.mark, kept_keys))
    return read_service(found.kind, objects, found.values, kept_keys)


def _translate_job(
    job: JobObject, documents: Sequence[Node], notes: ProblemNotes, kept_keys: TranslationNotes
) -> Translation:
    task = None
    try:
        task = read_job(job, kept_keys)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        message = f"a value of this {job.kind} has a form that Kubernetes does not accept"
        hint = "`kubectl apply --dry-run=server -f FILE` names the value"
        notes.add(job.mark, message, suggestion=hint)
    if task is not None and not any(each.refused for each in kept_keys.list_kept()):
        check_task(task, find_marks(job.mark, documents), job.mark, notes)
    return Translation(
        kind=Dialect.KUBERNETES,
        what=job.kind,
        tasks=() if task is None else (task,),
        kept=kept_keys.list_kept(),
    )
