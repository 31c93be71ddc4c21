"""Describes a task in plain words, so that the task's author can check how Cavvy understood the
task.
"""

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import starmap

from cavvy.catalog.residency import say_unplaced
from cavvy.domain.arrays import count_members, is_array
from cavvy.domain.local_time import to_local
from cavvy.domain.services import DEFAULT_AVAILABILITY
from cavvy.domain.tasks import (
    AcceleratorNeed,
    EdgeStep,
    JobLimits,
    MountMode,
    ResourceSpec,
    SpotPolicy,
    StartWindow,
    TaskSpec,
    Transfer,
    Volume,
    Workdir,
    take_role,
)
from cavvy.domain.units import format_duration, format_memory, format_rate, format_usd
from cavvy.planner.objections import describe_slice
from cavvy.spec.describe_service import describe_service
from cavvy.spec.engine_section import OWN_COMMAND
from cavvy.spec.problems import listed


def describe_task(task: TaskSpec) -> list[tuple[str, str]]:
    """Return the description as rows of name and text, with the most important row first. Keys that
    the file omits have no row.
    """
    if task.edge is not None:
        rows = [("name", task.name), ("step", describe_step(task.edge)), ("after", _after(task))]
        return [(name, text) for name, text in rows if text]
    groups = task.replica_groups
    parts = [take_role(task, each) for each in groups]
    needs = [f"{describe_nodes(each)}{_image(each)}{_setup(each)}" for each in parts]
    rows = [
        (
            "name",
            task.name if task.project == "default" else f"{task.name}, in project {task.project}",
        ),
        ("runs", "" if groups and all(each.run for each in groups) else _run(task)),
        *(() if task.service is None else describe_service(task.service, groups, needs)),
        ("on", "" if groups else describe_nodes(task)),
        ("close", _say_topology(task)),
        ("encrypts", "the traffic between its nodes" if task.encrypt else ""),
        ("where", _where(task.resources)),
        ("on spot", describe_spares(task)),
        *_others(task.resources),
        ("checked", _check(task.resources)),
        ("folder", _workdir(task.workdir)),
        (
            "inputs",
            ", ".join(f"{each.source} as {each.target}{_how(each)}" for each in task.inputs),
        ),
        (
            "outputs",
            ", ".join(f"{each.source} to {each.target}{_how(each)}" for each in task.outputs),
        ),
        ("buckets", say_unplaced(task)),
        (
            "volumes",
            ", ".join(f"{each.source} at {each.path}{_mode(each)}" for each in task.volumes),
        ),
        ("params", ", ".join(f"{name}={_scalar(value)}" for name, value in task.params.items())),
        ("jobs", _members(task)),
        ("secrets", ", ".join(task.secrets)),
        ("checkpoint", _checkpoint(task)),
        ("takes", _takes(task)),
        ("after", _after(task)),
        ("group", _group(task)),
        ("starts", _start(task)),
        ("stops", _limits(task)),
        ("tries again", _retry(task)),
    ]
    return [(name, text) for name, text in rows if text]


def describe_step(step: EdgeStep) -> str:
    """Return what the server does, for example: publishes the checkpoint of train as digits."""
    into = f", into {step.into} of the jobs after it" if step.into else ""
    if step.publish:
        return f"publishes the checkpoint of {step.publish} as {step.model}{into}"
    if step.deploy:
        return f"brings {step.deploy} to devices of {step.site or 'all sites'}"
    return f"waits for {step.samples:,} samples of {step.collect}{into}"


def _members(task: TaskSpec) -> str:
    """Return how many jobs an array has, and what differs between them, or ""."""
    if not is_array(task):
        return ""
    at_once = f", at most {task.parallel} at once" if task.parallel else ""
    over = " by ".join(f"{len(each.values)} values of {each.name}" for each in task.sweep)
    over = f"chosen by TPE from {over}" if task.search else over
    early = ", those that fall behind are stopped early" if task.stop_early else ""
    return f"{count_members(task):,}{over and f' ({over})'}{at_once}{early}"


def describe_spares(task: TaskSpec) -> str:
    """Return how replicas on spot are complemented, or "" if there are no such replicas."""
    policies = {each.spot for each in task.resources.choices} - {SpotPolicy.NEVER}
    if task.service is None or not policies:
        return ""
    more = "spare" if policies == {SpotPolicy.ONLY} else "spare and on-demand"
    share = 100 * (task.service.slo.availability or DEFAULT_AVAILABILITY)
    return f"{more} replicas are added so that enough replicas are ready for {share:g}% of the time"


def _takes(task: TaskSpec) -> str:
    if task.work is None or task.work.duration is None:
        return ""
    return f"{format_duration(task.work.duration)} on {task.work.measured_on or 'such a node'}"


def describe_nodes(task: TaskSpec) -> str:
    """Return a text for the nodes that the task requests, such as "2 nodes, each with 8 H100"."""
    count = f"{task.nodes} nodes, each" if task.nodes > 1 else "1 node"
    if (sizes := task.elastic) is not None:
        count = f"{sizes.least} to {sizes.most} nodes, each"
    about_slice = describe_slice(task)
    return f"{count} {_needs(task.resources)}" + (f": {about_slice}" if about_slice else "")


def _say_topology(task: TaskSpec) -> str:
    """Return which nodes are close to each other, or ""."""
    need = task.topology
    if need is None:
        return ""
    label = need.same or need.prefer
    told = f"in one {label}" + ("" if need.same else " if possible")
    if need.slice is not None:
        told = f"each {need.slice} neighbours in rank {told}"
    more = f", and in one {need.prefer} if possible" if need.same and need.prefer else ""
    return told + more


def describe_accelerator(need: AcceleratorNeed) -> str:
    """Return a text for one of the requested accelerators, such as "1 to 4 A100 of 40 to 80
    GiB".
    """
    most = need.count_max
    # 65,536 is `catalog.needs.MOST`, which means that the range has no upper bound.
    endless = most is not None and most >= 65_536
    count = str(need.count_min)
    if need.share_mib is not None:
        count = f"{format_memory(need.share_mib)} of an accelerator:"
    elif need.part < 1:
        count = f"at least {need.part:g} of an accelerator:"
    if endless:
        count = f"at least {count}"
    elif most is not None and most != need.count_min:
        count = f"{count} to {most}"
    low, high = need.memory_min_mib, need.memory_max_mib
    memory = ""
    if low is not None and low == high:
        memory = f" of {format_memory(low)}"
    elif low is not None or high is not None:
        memory = f" of {_between(low, high)}"
    return f"{count} {need.name or 'accelerators'}{memory}"


def _needs(need: ResourceSpec) -> str:
    own = need.stated()
    parts = [*_compute(own), *_storage(own)]
    kind = f"of type {need.instance}" if need.instance else ""
    text = (
        " ".join(part for part in (kind, f"with {listed(parts, 'and')}" if parts else "") if part)
        or "of any kind"
    )
    rented = [each for each in (*_compute(need), *_storage(need)) if each not in parts]
    return f"{text}; rented nodes also have {listed(rented, 'and')}" if rented else text


def _compute(need: ResourceSpec) -> Iterator[str]:
    if need.accelerators:
        yield listed(describe_accelerator(each) for each in need.accelerators)
    if need.cpus_min is not None or need.cpus_max is not None:
        noun = "CPU" if (need.cpus_min if need.cpus_max is None else need.cpus_max) == 1 else "CPUs"
        yield f"{_range(need.cpus_min, need.cpus_max, lambda value: f'{value:g}')} {noun}"
    if need.memory_min_mib is not None or need.memory_max_mib is not None:
        yield _between(need.memory_min_mib, need.memory_max_mib) + " of memory"
    if need.memory_per_cpu_mib is not None:
        yield f"at least {format_memory(need.memory_per_cpu_mib)} of memory for each CPU"


def _storage(need: ResourceSpec) -> Iterator[str]:
    if need.disk_gib is not None or need.disk_type is not None:
        size = f"{need.disk_gib} GiB of " if need.disk_gib is not None else ""
        yield f"{size}{need.disk_type or ''} disk".replace("  ", " ")
    if need.network is not None and need.network.min_mbps:
        yield f"a network of at least {need.network.min_mbps / 1000:g} Gbit/s"
    if need.network is not None and need.network.fabric:
        yield f"a network of the kind {need.network.fabric}"
    for each in need.options:
        values = json.loads(each.values).items()
        yield f"options of {each.provider} ({', '.join(starmap(_option, values))})"


def _option(name: str, value: object) -> str:
    return f"{name} {value}" if isinstance(value, str | int) and value is not True else name


def _between(low: int | None, high: int | None) -> str:
    return _range(low, high, lambda mib: format_memory(int(mib)))


def _range(low: float | None, high: float | None, shown: Callable[[float], str]) -> str:
    if low is None:
        return f"at most {shown(high or 0)}"
    if high is None:
        return f"at least {shown(low)}"
    return shown(low) if low == high else f"{shown(low)} to {shown(high)}"


def _where(need: ResourceSpec) -> str:
    places = f"at {listed(need.providers)}" if need.providers else "at any provider"
    regions = f" in {listed(need.regions)}" if need.regions else ""
    spot = {
        SpotPolicy.NEVER: "never on spot capacity",
        SpotPolicy.AUTO: "on spot capacity if that is cheaper in total",
        SpotPolicy.ONLY: "on spot capacity only",
    }[need.spot]
    price = (
        f", at most {format_rate(need.max_rate)} for each node" if need.max_rate is not None else ""
    )
    return f"{places}{regions}, {spot}{price}"


def _others(need: ResourceSpec) -> list[tuple[str, str]]:
    """Return one row for each alternative of the resources except the first."""
    word = "else" if need.ordered else "or"
    return [(word, f"{_needs(each)}, {_where(each)}") for each in need.any_of[1:]]


def _check(need: ResourceSpec) -> str:
    if need.check is None:
        return ""
    link = (
        f", and {need.check.link_mbps / 1000:g} Gbit/s between nodes"
        if need.check.link_mbps
        else ""
    )
    return (
        f"at boot: GPUs must reach at least {need.check.share:.0%} of the memory bandwidth in "
        f"their data sheet{link}"
    )


def _run(task: TaskSpec) -> str:
    lines = [line.strip() for line in task.run.strip().splitlines()]
    if not lines:
        return "nothing" + _image(task)
    if task.session:
        lines = ["a session that waits for you"]
    lines[0] = lines[0].replace(OWN_COMMAND, "the image's own command")
    # the whole command of a service, which Cavvy may have written for its engine
    short = task.service is None and len(lines[0]) > 70
    first = lines[0][:69] + "…" if short else lines[0]
    rest = len(lines) - 1
    more = f" (and {rest} more line{'s' if rest > 1 else ''})" if rest else ""
    return first + more + _image(task) + _setup(task)


def _setup(task: TaskSpec) -> str:
    return ", after its setup" if task.setup else ""


def _how(item: Transfer) -> str:
    parts = ["streamed"] if item.stream else []
    if item.mount is not None:
        cache = " with a cache" if item.mount is MountMode.CACHED else ""
        parts.append(f"mounted{cache}, {'writable' if item.writable else 'read-only'}")
    if item.every is not None:
        parts.append(f"also every {_length(item.every)} while the work runs")
    if item.size_mib is not None:
        parts.append(format_memory(item.size_mib))
    if item.region is not None:
        parts.append(f"in {item.region}")
    return f" ({', '.join(parts)})" if parts else ""


def _mode(volume: Volume) -> str:
    return " (read only)" if volume.read_only else ""


def _image(task: TaskSpec) -> str:
    if task.image_build is not None:
        path = "" if task.image_build.path == "." else task.image_build.path + "/"
        return f", in the image of {path}{task.image_build.dockerfile}"
    return f", in the image {task.image}" if task.image else ""


def _workdir(workdir: Workdir | None) -> str:
    if workdir is None:
        return "an empty one"
    if workdir.git is not None:
        return f"{workdir.git} at {workdir.commit or 'no commit'}"
    return f"{workdir.path}, frozen when it is submitted"


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checkpoint(task: TaskSpec) -> str:
    if task.checkpoint is None:
        return ""
    every = f", every {_length(task.checkpoint.every)}" if task.checkpoint.every else ""
    every = ", at an interval that Cavvy chooses" if task.checkpoint.auto else every
    return f"{task.checkpoint.path}{every}; kept when a node is lost"


def _window(window: StartWindow) -> str:
    zone = window.time_zone
    return window.text if window.text.endswith(zone) else f"{window.text} ({zone})"


def _start(task: TaskSpec) -> str:
    window = f"when it is cheapest in {_window(task.window)}" if task.window else ""
    if task.schedule is None:
        return window
    zone = f"repeatedly: {task.schedule.cron} ({task.schedule.time_zone})"
    start = _time(task.schedule.at) if task.schedule.at else zone
    return f"{start}, {window}" if window else start


def _after(task: TaskSpec) -> str:
    ends = (each.job if each.on == "success" else f"{each.job} ({each.on})" for each in task.after)
    return listed(ends, "and") if task.after else ""


def _group(task: TaskSpec) -> str:
    if task.group is None:
        return ""
    if not task.group.helper:
        return task.group.name
    linger = f", for {_length(task.group.linger)} after the others" if task.group.linger else ""
    return f"{task.group.name}, as a helper{linger}"


def _limits(task: TaskSpec) -> str:
    limits = task.limits
    parts = [
        f"at {_time(limits.deadline)}" if limits.deadline else "",
        f"{_length(limits.deadline_after)} after its submission" if limits.deadline_after else "",
        f"after running for {_length(limits.duration)}" if limits.duration else "",
        f"before it costs more than {format_usd(limits.budget)}" if limits.budget else "",
        _idle(limits),
        f"after {_length(limits.stuck)} without progress" if limits.stuck else "",
    ]
    return listed(part for part in parts if part) if any(parts) else ""


def _idle(limits: JobLimits) -> str:
    if not limits.idle:
        return ""
    if limits.idle_gpu_percent:
        return f"after {_length(limits.idle)} with less than {limits.idle_gpu_percent:g} % GPU use"
    return f"after being idle for {_length(limits.idle)}"


def _retry(task: TaskSpec) -> str:
    retry = task.retry
    parts = [
        _times(retry.preemption, "being preempted"),
        _times(retry.node, "the loss of a node"),
        _times(
            retry.exit,
            f"exit code {listed(map(str, retry.exit_codes))}" if retry.exit_codes else "a failure",
        ),
    ]
    return ", ".join(part for part in parts if part) or "never"


def _times(count: int | None, what: str) -> str:
    if count == 0:
        return ""
    return f"after {what}" + ("" if count is None else " once" if count == 1 else f" {count} times")


def _time(moment: datetime | None) -> str:
    return f"{to_local(moment):%Y-%m-%d %H:%M %Z}" if moment else ""


def _length(length: timedelta | None) -> str:
    return format_duration(length).removesuffix("00m").removesuffix("00s") if length else ""
