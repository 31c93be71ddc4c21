"""Writes tasks as the keys of Cavvy's task file, which `cavvy convert` prints.

What a task states and its defaults do not is written. `list_differences` names the keys that the
written file would lack, so that nothing is lost in silence.
"""

import json
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from cavvy.catalog.needs import format_need
from cavvy.domain.services import ReadinessProbe, ReplicaCount, ServiceSpec, TargetKind
from cavvy.domain.tasks import (
    JobDependency,
    JobLimits,
    JobSchedule,
    NetworkNeed,
    NodeCheck,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    StartCondition,
    TaskSpec,
    Transfer,
    Volume,
    VolumeKind,
    WebhookTarget,
)
from cavvy.domain.values import replace

Keys = dict[str, Any]
_EXPRESSION = re.compile(r"\$\{\{(?!\s*image\.)")
_PLAIN = ("priority", "tags", "env", "best", "trials", "machine", "pool", "session")


def make_keys(task: TaskSpec) -> Keys:
    """Return the keys of a task file that describe the task."""
    keys: Keys = {"name": task.name}
    if task.project != "default":
        keys["project"] = task.project
    keys |= _write_place_in_graph(task)
    # a key that only Cavvy's files have, by which the file is known
    keys["nodes"] = task.nodes if task.elastic is None else str(task.elastic)
    plain = TaskSpec(name="", run="")
    for name in _PLAIN:
        if (value := getattr(task, name)) != getattr(plain, name):
            keys[name] = value
    if resources := _write_resources(task.resources):
        keys["resources"] = resources
    if (need := task.topology) is not None:
        keys["topology"] = _filled(same=need.same, prefer=need.prefer, slice=need.slice)
    keys |= _write_image(task) | _write_folder(task) | _write_data(task) | _write_rules(task)
    if task.service is not None:
        keys["service"] = _write_service(task.service)
    if task.setup is not None:
        uses = None if task.setup_uses is None else list(task.setup_uses)
        keys["setup"] = task.setup if uses is None else {"run": task.setup, "uses": uses}
    keys["run"] = task.run
    written: Keys = _escape(keys)
    return written


def _escape(value: Any) -> Any:
    """Return a value whose texts contain no expression that Cavvy would replace, except the command
    of an image.
    """
    if isinstance(value, dict):
        return {key: _escape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_escape(each) for each in value]
    return _EXPRESSION.sub("$${{", value) if isinstance(value, str) else value


def _write_place_in_graph(task: TaskSpec) -> Keys:
    """Return the keys that say how the task belongs to other jobs, and how many jobs it is."""
    keys: Keys = {}
    if (group := task.group) is not None:
        linger = _length(group.linger) if group.linger else None
        keys["group"] = _filled(name=group.name, helper=group.helper or None, linger=linger)
    if task.after:
        keys["after"] = [_write_dependency(each) for each in task.after]
    if task.array:
        spans = [f"{span.first}-{span.last}:{span.step}" for span in task.array]
        keys["array"] = ",".join(span.removesuffix(":1") for span in spans)
    if task.parallel is not None:
        keys["parallel"] = task.parallel
    return keys


def _write_data(task: TaskSpec) -> Keys:
    return _filled(
        secrets=list(task.secrets),
        inputs=[_write_transfer(each) for each in task.inputs],
        outputs=[_write_transfer(each) for each in task.outputs],
        volumes=[_write_volume(each) for each in task.volumes],
    )


def list_differences(task: TaskSpec, written: TaskSpec) -> list[str]:
    """Return the names of the attributes in which a task and the one of its written file differ."""
    task, written = _neutral(task), _neutral(written)
    return [
        name for name in TaskSpec.__struct_fields__ if getattr(task, name) != getattr(written, name)
    ]


def _neutral(task: TaskSpec) -> TaskSpec:
    """Return the task without what has no meaning of its own."""
    needs = replace(
        task.resources,
        implied=(),
        any_of=tuple(replace(each, implied=()) for each in task.resources.any_of),
    )
    run = task.run.strip("\n")
    setup = None if task.setup is None else task.setup.strip("\n")
    service = task.service and replace(task.service, fixed_port=False)
    return replace(task, resources=needs, run=run, setup=setup, service=service)


def _filled(**values: Any) -> Keys:
    """Return the values that are there."""
    return {name: value for name, value in values.items() if value not in (None, (), [], "", {})}


def _length(length: timedelta) -> str:
    """Write a length of time with the largest unit that divides it."""
    seconds = length.total_seconds()
    for unit, factor in (("h", 3600), ("m", 60)):
        if seconds and seconds % factor == 0:
            return f"{int(seconds // factor)}{unit}"
    return f"{seconds:f}".rstrip("0").rstrip(".") + "s"


def _size(mib: int) -> str:
    return f"{mib // 1024}GB" if mib % 1024 == 0 else f"{mib}MB"


def _number(value: float) -> str:
    return f"{value:f}".rstrip("0").rstrip(".")


def _range(low: str | None, high: str | None) -> str | None:
    if high is None:
        return low
    return f"{low or ''}..{high}"


def _write_dependency(each: JobDependency) -> str:
    return each.job if each.on is StartCondition.SUCCESS else f"{each.job}:{each.on}"


def _write_resources(needs: ResourceSpec) -> Keys:
    if not needs.any_of:
        return _write_choice(needs)
    rows = [_write_choice(each) for each in needs.any_of]
    return {"ordered" if needs.ordered else "any_of": rows}


def _write_choice(need: ResourceSpec) -> Keys:
    gpus = [format_need(each) for each in need.accelerators]
    cpus = [None if each is None else _number(each) for each in (need.cpus_min, need.cpus_max)]
    sizes = [
        None if each is None else _size(each) for each in (need.memory_min_mib, need.memory_max_mib)
    ]
    memory = _range(*sizes)
    if need.memory_per_cpu_mib is not None:
        memory = f"{_number(need.memory_per_cpu_mib / 1024)}x"
    disk: Any = None if need.disk_gib is None else f"{need.disk_gib}GB"
    if need.disk_type is not None:
        disk = _filled(size=disk, type=need.disk_type)
    return _filled(
        instance=need.instance,
        gpu=gpus[0] if len(gpus) == 1 else gpus,
        cpu=_range(*cpus),
        memory=memory,
        disk=disk,
        spot=None if need.spot is SpotPolicy.NEVER else need.spot.value,
        providers=list(need.providers),
        regions=list(need.regions),
        network=None if need.network is None else _write_network(need.network),
        max_price=None if need.max_rate is None else str(need.max_rate.usd),
        check=None if need.check is None else _write_check(need.check),
        options={each.provider: json.loads(each.values) for each in need.options},
    )


def _write_network(need: NetworkNeed) -> Keys:
    return _filled(
        min=None if need.min_mbps is None else f"{need.min_mbps}Mbps",
        fabric=None if need.fabric is None else need.fabric.value,
        vpc=need.vpc,
        subnet=need.subnet,
        security_groups=list(need.security_groups),
        key=need.key,
        public_ip=need.public_ip,
    )


def _write_check(check: NodeCheck) -> Keys:
    link = None if check.link_mbps is None else f"{check.link_mbps}Mbps"
    return _filled(share=check.share, link=link)


def _write_image(task: TaskSpec) -> Keys:
    if (build := task.image_build) is not None:
        dockerfile = None if build.dockerfile == "Dockerfile" else build.dockerfile
        return {
            "image": _filled(
                build=build.path, dockerfile=dockerfile, target=build.target, args=build.args
            )
        }
    if task.image is None:
        return {}
    if task.image_login is not None:
        return {"image": {"name": task.image, "login": task.image_login}}
    return {"image": task.image}


def _write_folder(task: TaskSpec) -> Keys:
    folder = task.workdir
    if folder is None:
        return {"workdir": None}  # without the key, a folder that `run` names would be submitted
    if folder.git is not None:
        return {"workdir": _filled(git=folder.git, commit=folder.commit)}
    return {"workdir": folder.path}


def _write_transfer(each: Transfer) -> Keys:
    mode = "stream" if each.stream else each.mount and each.mount.value
    return _filled(
        source=each.source,
        target=each.target,
        mode=mode,
        writable=each.writable or None,
        every=None if each.every is None else _length(each.every),
        size=None if each.size_mib is None else _size(each.size_mib),
        region=each.region,
    )


def _write_volume(volume: Volume) -> Keys:
    kind = "name" if volume.kind is VolumeKind.NAMED else volume.kind.value
    return _filled(
        **{kind: volume.source},
        path=volume.path,
        read_only=volume.read_only or None,
        size=None if volume.size_gib is None else f"{volume.size_gib}GB",
        type=volume.type,
        keep=None if volume.keep else False,
        options=volume.options,
    )


def _write_rules(task: TaskSpec) -> Keys:
    """Return the keys that say when the task starts, ends, saves and is tried again."""
    keys: Keys = {}
    if (point := task.checkpoint) is not None:
        every = "auto" if point.auto else point.every and _length(point.every)
        keys["checkpoint"] = _filled(
            path=point.path,
            every=every,
            size=None if point.size_mib is None else _size(point.size_mib),
            step=point.step and _length(point.step),
            storage=point.storage,
            region=point.region,
        )
    if limits := _write_limits(task.limits):
        keys["limits"] = limits
    if retry := _write_retry(task.retry):
        keys["retry"] = retry
    if task.schedule is not None:
        keys["schedule"] = _write_schedule(task.schedule)
    if task.window is not None:
        keys["window"] = task.window.text
    if task.webhooks:
        keys["webhooks"] = [_write_webhook(each) for each in task.webhooks]
    plain = TaskSpec(name="", run="")
    if task.grace != plain.grace:
        keys["grace"] = _length(task.grace)
    if task.keep:
        keys["keep"] = _length(task.keep)
    if task.on_loss is not plain.on_loss:
        keys["on_loss"] = task.on_loss.value
    if task.notify is not plain.notify:
        keys["notify"] = task.notify.value
    return keys


def _write_limits(limits: JobLimits) -> Keys:
    deadline = limits.deadline.isoformat() if limits.deadline is not None else None
    if limits.deadline_after is not None:
        deadline = _length(limits.deadline_after)
    idle: Any = None if limits.idle is None else _length(limits.idle)
    if limits.idle_gpu_percent:
        idle = _filled(**{"gpu": f"{limits.idle_gpu_percent:g}%", "for": idle})
    unattended = limits.unattended
    return _filled(
        deadline=deadline,
        duration=None if limits.duration is None else _length(limits.duration),
        budget=None if limits.budget is None else str(limits.budget.usd),
        idle=idle,
        stuck=None if limits.stuck is None else _length(limits.stuck),
        unattended=None if unattended == JobLimits().unattended else _length(unattended),
    )


def _write_retry(retry: RetryPolicy) -> Keys:
    plain, keys = RetryPolicy(), Keys()
    for name in ("preemption", "node", "exit"):
        if (count := getattr(retry, name)) != getattr(plain, name):
            keys[name] = "unlimited" if count is None else count
    if retry.exit_codes:
        keys["exit_codes"] = list(retry.exit_codes)
    if retry.delay:
        keys["delay"] = _length(retry.delay)
    if retry.parallel != plain.parallel:
        keys["parallel"] = retry.parallel
    return keys


def _write_schedule(schedule: JobSchedule) -> Any:
    if schedule.at is not None:
        return {"at": schedule.at.isoformat()}
    zone = None if schedule.time_zone == "UTC" else schedule.time_zone
    return _filled(cron=schedule.cron, time_zone=zone)


def _write_webhook(hook: WebhookTarget) -> Any:
    if hook.on == WebhookTarget(url="").on:
        return hook.url
    return {"url": hook.url, "on": [each.value for each in hook.on]}


def _write_service(service: ServiceSpec) -> Keys:
    plain = ServiceSpec()
    keys: Keys = {"port": service.port}
    if replicas := _write_replicas(service.replicas):
        keys["replicas"] = replicas
    if service.concurrency != plain.concurrency:
        keys["concurrency"] = service.concurrency
    if probe := _write_probe(service.probe):
        keys["probe"] = probe
    if service.drain != plain.drain:
        keys["drain"] = _length(service.drain)
    for name in ("queue", "fallback", "response", "silence"):
        length = getattr(service.timeouts, name)
        if length != getattr(plain.timeouts, name):
            keys.setdefault("timeouts", {})[name] = _length(length)
    for name in ("models", "hosts", "origins", "regions"):
        if value := getattr(service, name):
            keys[name] = list(value)
    for name in ("keys", "price_header", "strip_prefix"):
        if (value := getattr(service, name)) != getattr(plain, name):
            keys[name] = value
    if service.rates:
        keys["rate"] = [
            _filled(
                requests=_number(each.requests),
                per=_length(each.per),
                burst=each.burst,
                each=each.each.value,
                header=each.header,
                prefix=each.prefix,
            )
            for each in service.rates
        ]
    return keys


def _write_replicas(count: ReplicaCount) -> Keys:
    plain, target = ReplicaCount(), count.target
    keys: Keys = {"min": count.least, "max": count.most}
    if target != plain.target:
        if target.kind is TargetKind.METRIC:
            keys["target"] = {"metric": target.metric, "value": target.value}
        elif target.kind is TargetKind.QUEUE_WAIT:
            keys["target"] = {"queue_wait": _length(timedelta(seconds=target.value))}
        else:
            keys["target"] = {target.kind.value: target.value}
    if count.idle != plain.idle:
        keys["idle"] = _length(count.idle)
    return keys


def _write_probe(probe: ReadinessProbe) -> Keys:
    plain, keys = ReadinessProbe(), Keys()
    for name in ("path", "failures", "any_status", "body"):
        if (value := getattr(probe, name)) != getattr(plain, name):
            keys[name] = value
    for name in ("every", "timeout", "start"):
        if (length := getattr(probe, name)) != getattr(plain, name):
            keys[name] = _length(length)
    if probe.headers:
        keys["headers"] = dict(probe.headers)
    return keys


def write_head(kind: str, what: str, file: str, remarks: Sequence[str]) -> str:
    """Return the comment at the top of a written file."""
    lines = [f"from the {what} of {kind} in {file}", *remarks]
    return "".join(f"# {line}\n" for each in lines for line in each.splitlines())
