"""The section `edge`: what the server does with a model of devices in place of a program."""

from datetime import timedelta

from cavvy.domain.tasks import EdgeStep, find_wrong_waves
from cavvy.spec.fields.after import check_job
from cavvy.spec.fields.kinds import (
    ListKind,
    SectionReader,
    check_slug,
    named_texts,
    number,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.places import inner_path
from cavvy.spec.fields.times import length_kind

RUN = "true"  # what a job without a program has as its `run`
_ACTIONS = {
    "publish": ("model", "main", "residency", "into"),
    "deploy": ("site", "labels", "waves", "soak", "below"),
    "collect": ("samples", "residency", "into"),
}
# The keys of a task that mean something without a program. All others, also those that are added to
# tasks later, are refused.
_FITTING = {
    *("name", "project", "tags", "params", "priority", "after", "limits", "notify", "webhooks"),
    *("edge", "run"),
}
_SHARE = number("a share such as 0.6", 0, 1)
_ELSEWHERE = "put it into another task of the file"


def check_edge(table: SectionReader) -> None:
    """Add a problem for each key that has no meaning beside `edge`."""
    step: EdgeStep | None = table.get("edge")
    if not table.has("edge"):
        return
    table.reject_beside("edge", table.list_others(_FITTING))
    if table.get("run") not in (RUN, None):
        table.wrong(
            "run", "the server does what `edge` says, so no program runs", suggestion=_ELSEWHERE
        )
    if step is not None and step.publish not in (
        "",
        *(each.job for each in table.get("after", ())),
    ):
        table.wrong(
            "edge",
            f"the job {step.publish} has a checkpoint only when it has ended",
            suggestion=f"add `after: {step.publish}`",
        )


def _build(table: SectionReader) -> EdgeStep | None:
    given = [each for each in _ACTIONS if table.has(each)]
    if len(given) != 1:
        told = f"{' and '.join(given)} are several steps" if given else "the step does nothing"
        table.wrong(given[-1] if given else "", told, expected="one of publish, deploy and collect")
        return None
    action = given[0]
    others = {each for keys in _ACTIONS.values() for each in keys} - {*_ACTIONS[action]}
    table.reject_beside(action, sorted(others))
    if action == "publish" and not table.has("model"):
        table.wrong("publish", "the model has no name", suggestion="add `model: NAME`")
    if action == "collect" and not table.has("into"):
        hint = "add `into: samples.jsonl`, a file in the working folder of the jobs after this one"
        table.wrong("collect", "the samples come to no job", suggestion=hint)
    if problem := find_wrong_waves(table.get("waves", ())):
        table.wrong("waves", problem, suggestion="write `waves: [0, 0.01, 0.1, 1]`")
    return table.make(EdgeStep)


EDGE = section(
    "edge",
    _build,
    publish=text_kind("a job's name or ID", check_job),
    model=text_kind("a model's name", check_slug),
    main=text_kind("a path in the checkpoint", inner_path),
    deploy=text_kind("MODEL, MODEL@NUMBER or MODEL@LABEL", lambda text: _check_model(text)),
    site=text_kind("the name of a site", check_slug),
    labels=named_texts("names of labels, each with a value", str, missing="the label has no value"),
    waves=ListKind(_SHARE),
    soak=length_kind(timedelta(0), timedelta(days=366)),
    below=_SHARE,
    collect=text_kind("a model's name", check_slug),
    samples=whole(1, 100_000),
    residency=text_kind("a value of the label residency", check_slug),
    into=text_kind("a path in the working folder", inner_path),
)


def _check_model(text: str) -> str:
    model, _, which = text.partition("@")
    check_slug(model)
    if "@" in text:
        check_slug(which)
    return text
