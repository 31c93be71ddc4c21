"""Translates a file of Kubernetes: a Deployment to a service, and a job to a job."""

from collections.abc import Sequence

from cavvy.capabilities.importers.dialects import Dialect
from cavvy.capabilities.importers.kubernetes.deployment import read_service_task
from cavvy.capabilities.importers.kubernetes.jobs import read_job
from cavvy.capabilities.importers.kubernetes.objects import JobObject, find_job, read_objects
from cavvy.capabilities.importers.own_rules import check_task
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.translation import Translation
from cavvy.spec.tree import Node


def translate(documents: Sequence[Node], notes: ProblemNotes) -> Translation:
    """Translate a file with one Deployment, or with one job. Features that a service or a job does
    not support are refused.
    """
    kept_keys = TranslationNotes()
    if (job := find_job(documents, kept_keys)) is not None:
        return _translate_job(job, notes, kept_keys)
    objects = read_objects(documents, kept_keys)
    task = None
    if objects is not None:
        try:
            task = read_service_task(objects, kept_keys)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            # This module checks only the values that it reads, not Kubernetes' own schema
            message = "a value of this Deployment or of its Service, claims or autoscaler has a "
            message += "form that Kubernetes does not accept"
            hint = "`kubectl apply --dry-run=server -f FILE` names the value"
            notes.add(objects.mark, message, suggestion=hint)
    return Translation(
        kind=Dialect.KUBERNETES,
        what="file" if objects is None else "service",
        tasks=() if task is None else (task,),
        kept=kept_keys.list_kept(),
    )


def _translate_job(job: JobObject, notes: ProblemNotes, kept_keys: TranslationNotes) -> Translation:
    task = None
    try:
        task = read_job(job, kept_keys)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        message = f"a value of this {job.kind} has a form that Kubernetes does not accept"
        hint = "`kubectl apply --dry-run=server -f FILE` names the value"
        notes.add(job.mark, message, suggestion=hint)
    if task is not None and not any(each.refused for each in kept_keys.list_kept()):
        check_task(task, {}, job.mark, notes)
    return Translation(
        kind=Dialect.KUBERNETES,
        what=job.kind,
        tasks=() if task is None else (task,),
        kept=kept_keys.list_kept(),
    )
