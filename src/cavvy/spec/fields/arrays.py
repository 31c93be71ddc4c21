"""The fields `array` and `sweep`: the members of an array of jobs."""

import re
from collections.abc import Iterator
from itertools import chain

from cavvy.domain.arrays import MOST_MEMBERS, count_combinations, count_members, is_array
from cavvy.domain.tasks import EarlyStop, IndexRange, SweepSearch, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.fields.kinds import (
    TEXT_OR_NUMBER,
    EitherKind,
    ListKind,
    MapKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    read_text,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.params import WRITTEN, WrittenValue, check_name
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode, read_scalar

_HIGHEST = 9_999_999  # index
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_VALUES = re.compile(r"(-?[0-9]{1,15})\.\.(-?[0-9]{1,15})(?::([0-9]{1,15}))?")
# Bounded, since the time to refuse a text grows with the square of the bounds.
_NUMBER = r"[-+]?[0-9_]{0,40}\.?[0-9]{1,40}(?:e[-+]?[0-9]{1,9})?"
_LIKE_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(?::{_NUMBER})?", re.IGNORECASE)
_WORD_RANGE = re.compile(r"\w{1,63}\.\.\w{1,63}")
_MOST_COMBINATIONS = 10**15  # of the values in a search
_NO_BEST = "`best` is missing: the metric by which the jobs are compared"
_BEST_HINT = "add, for example, `best: val_loss:min`"
_EXPECTED = "indices such as 0-99, 0-99:5 or 1,3,7-9"


def read_indices(text: str) -> tuple[IndexRange, ...]:
    """Return the indices of an array such as 0-99, 0-99:5 or 1,3,7-9. Raises WrongValue."""
    text = text.strip()
    if re.fullmatch("[0-9]+", text):
        count = int(text)
        meant = f"0-{count - 1} for {count:,} jobs, or " if count > 1 else ""
        what = "an array of 0 has no jobs" if not count else f"{text} may be a number or an index"
        raise WrongValue(what, suggestion=f"write {meant}{text}-{text} for one job of index {text}")
    if "%" in text:
        before, _, most = text.partition("%")
        hint = f"write {before}, and `parallel: {most}` or --parallel {most}"
        raise WrongValue(f"{shown(text)} contains %", suggestion=hint)
    found = tuple(_read_range(part.strip()) for part in text.split(","))
    if (count := sum(len(each.indices) for each in found)) > MOST_MEMBERS:
        raise WrongValue(f"{count:,} jobs are too many", expected=f"at most {MOST_MEMBERS:,} jobs")
    seen = set[int]()
    for index in chain.from_iterable(each.indices for each in found):
        if index in seen:
            raise WrongValue(f"the index {index} is in {shown(text)} twice")
        seen.add(index)
    return found


def _read_range(text: str) -> IndexRange:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise WrongValue(f"{shown(text)} is not a range of indices")
    first = int(found[1])
    last, step = int(found[2] or first), int(found[3] or 1)
    if last < first:
        raise WrongValue(f"{text} ends before it begins", suggestion=f"write {last}-{first}")
    if not step:
        raise WrongValue(f"{text} has a step of 0")
    if last > _HIGHEST:
        raise WrongValue(f"the index {last:,} is too large", expected=f"at most {_HIGHEST:,}")
    return IndexRange(first, last, step)


def _read_one_line(node: ScalarNode) -> tuple[WrittenValue, ...]:
    """Read values in one string: `0..4`, `0..100:10`, or values with commas between them."""
    text = read_text(node).strip()
    if found := _VALUES.fullmatch(text):
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
        if last < first or not step:
            raise WrongValue(f"{text} contains no values")
        count = (last - first) // step + 1
        if count > MOST_MEMBERS:
            expected = f"at most {MOST_MEMBERS:,} values"
            raise WrongValue(f"{text} contains {count:,} values", expected=expected)
        return tuple(
            WrittenValue(value=each, text=str(each)) for each in range(first, last + 1, step)
        )
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise WrongValue(f"{shown(text)} contains an empty value")
    for part in parts:
        if _LIKE_RANGE.fullmatch(part):
            hint = "write other values one by one with commas between them, such as 0.1,0.5,0.9"
            expected = "one range of whole numbers, such as 0..4 or 0..100:10"
            raise WrongValue(f"{part} cannot be swept", expected=expected, suggestion=hint)
        if _WORD_RANGE.fullmatch(part):
            hint = "separate words by commas; a text with `..` goes into a list in the task file"
            expected = "a range of whole numbers, such as 0..4"
            raise WrongValue(f"{part} is no range of numbers", expected=expected, suggestion=hint)
    if len(set(parts)) < len(parts):
        raise WrongValue(f"{shown(text)} contains a value twice")
    return tuple(WrittenValue(value=_parse(part), text=part) for part in parts)


def _parse(text: str) -> str | int | float | bool:
    value = read_scalar(text)
    return text if value is None else value


ARRAY = text_kind(_EXPECTED, read_indices, numbers=True)
_LINE = ScalarKind("values such as 0.1,0.01 or 0..4", _read_one_line, TEXT_OR_NUMBER)
SWEEP = MapKind(
    "names of parameters, each with its values",
    check_name,
    EitherKind((_LINE, ListKind(WRITTEN))),
)


_METRIC = re.compile(r"([^\s:]{1,64}):(min|max)")


def _read_metric(text: str) -> str:
    if not _METRIC.fullmatch(text.strip()) or not text.strip().isprintable():
        hint = "for example val_loss:min or accuracy:max"
        raise WrongValue(f"{shown(text)} is not a metric with min or max", suggestion=hint)
    return text.strip()


def _read_rule(text: str) -> EarlyStop:
    if text.strip().lower() != "asha":
        raise WrongValue(f"{shown(text)} is not a rule", suggestion="write `asha`")
    return EarlyStop(metric="")


def _build_rule(table: SectionReader) -> EarlyStop | None:
    return table.make(EarlyStop, metric="")


def _read_search(text: str) -> SweepSearch:
    if text.strip().lower() != "tpe":
        hint = "write `tpe`; a sweep without `search` has a job for each combination of its values"
        raise WrongValue(f"{shown(text)} is not a search", suggestion=hint)
    return SweepSearch(metric="")


def _build_search(table: SectionReader) -> SweepSearch | None:
    return table.make(SweepSearch, metric="")


BEST = text_kind("a metric with min or max, such as val_loss:min", _read_metric)
STOP_EARLY = EitherKind(
    (
        text_kind("asha", _read_rule),
        section(
            "stop_early",
            _build_rule,
            min_steps=whole(1, 1_000_000_000),
            reduction=whole(2, 100),
            step=text_kind("the name of a value that the program reports"),
        ),
    )
)


SEARCH = EitherKind(
    (
        text_kind("tpe", _read_search),
        section("search", _build_search, seed=whole(0, 2**31 - 1)),
    )
)
TRIALS = whole(1, 1000)


def check_early(table: SectionReader) -> None:
    """Note that the metric is missing by which jobs are stopped early."""
    if table.has("stop_early") and not table.has("best"):
        table.wrong("stop_early", _NO_BEST, suggestion=_BEST_HINT)


def add_metric(task: TaskSpec) -> TaskSpec:
    """Return the task with its metric in the rules that compare the jobs of a sweep, and with the
    usual search if only the number of trials is given."""
    metric, _, which = task.best.rpartition(":")
    highest = which == "max"
    search = task.search or (SweepSearch(metric="") if task.trials else None)
    return replace(
        task,
        stop_early=task.stop_early and replace(task.stop_early, metric=metric, highest=highest),
        search=search and replace(search, metric=metric, highest=highest),
    )


def list_misfits(task: TaskSpec) -> Iterator[tuple[str, str, str]]:
    """Yield each key of the task that cannot be used as it is with or without an array: the key,
    the reason, and a hint."""
    if not is_array(task):
        if task.parallel is not None:
            yield "parallel", "only an array or a sweep has jobs that run in parallel", "delete it"
        for key in ("best", "stop_early", "search", "trials"):
            if getattr(task, key):
                yield key, "only the jobs of a sweep are compared", "add `sweep`, or delete it"
        return
    yield from _list_search_misfits(task)
    kind = "sweep" if task.sweep else "array"
    if task.array and task.sweep:
        yield (
            "array",
            "a task has either `array` or `sweep`",
            "use the index as one more parameter of the sweep, such as `index: 0..9`",
        )
    elif (count := count_members(task)) > MOST_MEMBERS:
        yield kind, f"{count:,} jobs are too many", f"use at most {MOST_MEMBERS:,} jobs"
    elif task.search and task.trials and task.trials > (all_of_it := count_combinations(task)):
        message = f"the sweep has only {all_of_it:,} combinations of values"
        yield "trials", message, "delete `search` and `trials`: each combination then gets a job"
    elif task.search and count_combinations(task) > _MOST_COMBINATIONS:
        yield "sweep", f"more than {_MOST_COMBINATIONS:,} combinations", "use fewer values"
    misfits = {
        "service": task.service is not None,
        "machine": task.machine is not None,
        "session": task.session,
        "schedule": task.schedule is not None,
    }
    for key, misfit in misfits.items():
        if misfit:
            yield key, f"`{kind}` cannot be used with `{key}`", f"delete `{key}` or `{kind}`"


def _list_search_misfits(task: TaskSpec) -> Iterator[tuple[str, str, str]]:
    if task.search and not task.sweep:
        yield "search", "an array has no values to choose from", "use `sweep`, or delete it"
    elif task.search and not task.search.metric:
        yield "search" if task.trials is None else "trials", _NO_BEST, _BEST_HINT
    elif task.search and not task.trials:
        hint = "add, for example, `trials: 30`, or --trials 30"
        yield "search", "`trials` is missing: the number of jobs", hint
