"""SkyPilot's rules for the top of a task file and for what Cavvy only keeps: services, pools,
storage, settings.
"""

import re
from collections.abc import Mapping

from cavvy.importers.shapes import (
    AnyRule,
    ListRule,
    OneOfRule,
    ShapeRule,
    TableRule,
    is_null,
    optional,
)
from cavvy.importers.skypilot.needs import CLOUDS, INFRA, NEEDS, SIZE
from cavvy.importers.skypilot.scalars import FLAG, TEXT, choice, number, text, whole
from cavvy.importers.yaml11 import to_value
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

ANY_TABLE = TableRule(other=AnyRule())
_TEXT_TABLE = TableRule(other=TEXT)
_TEXTS = OneOfRule(shapes=(TEXT, ListRule(item=TEXT)))
VARIABLE = r"[a-zA-Z_][a-zA-Z0-9_]*"
_LENGTH_S = r"^[0-9]+(s|m|h|d|w|S|M|H|D|W)?$"

# file_mounts

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)"
_RCLONE_SIZE = text("a size such as 64M", pattern=r"^[0-9]+[bkmgtpBKMGTP]?$")
_RCLONE_TIME = text("a time such as 10s", pattern=rf"^(({_NUMBER})(ms|[smhdwMy]))+$|^{_NUMBER}$")
_CACHED = TableRule(
    fields={
        "transfers": whole(1),
        "buffer_size": _RCLONE_SIZE,
        "vfs_cache_max_size": _RCLONE_SIZE,
        "vfs_cache_max_age": _RCLONE_TIME,
        "vfs_read_ahead": _RCLONE_SIZE,
        "vfs_read_chunk_size": _RCLONE_SIZE,
        "vfs_read_chunk_streams": whole(0),
        "vfs_write_back": _RCLONE_TIME,
        "read_only": FLAG,
    }
)

_STORES = "s3 gcs azure r2 ibm oci nebius coreweave vastdata hf volume"


def _check_storage(table: MapNode, notes: ProblemNotes) -> None:
    mode = _text(table, "mode").upper() or "MOUNT"
    config = table.get("config")
    inner = config if isinstance(config, MapNode) else None
    for key, needed, there in (
        ("type", "MOUNT_CACHED", table.get("type")),
        ("config.mount_cached", "MOUNT_CACHED", inner.get("mount_cached") if inner else None),
        ("config.mount", "MOUNT", inner.get("mount") if inner else None),
    ):
        if there is not None and not is_null(there) and mode != needed:
            notes.add(there.mark, f"`{key}` needs `mode: {needed}`, not {mode}")


STORAGE = TableRule(
    nulls=True,
    fields={
        "name": TEXT,
        "source": OneOfRule(shapes=(TEXT, ListRule(item=TEXT, least=1))),
        "store": choice(_STORES.split()),
        "persistent": FLAG,
        "mode": choice(("MOUNT", "COPY", "MOUNT_CACHED")),
        "type": choice(("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW")),
        "config": TableRule(
            fields={
                "disk_size": SIZE,
                "disk_tier": TEXT,
                "storage_type": TEXT,
                "attach_mode": TEXT,
                "mount_cached": _CACHED,
                "mount": TableRule(
                    fields={"read_only": FLAG, "hf_mount_args": ListRule(item=TEXT)}
                ),
            },
            other=AnyRule(),
        ),
        "_is_sky_managed": FLAG,
        "_bucket_sub_path": TEXT,
        "_force_delete": FLAG,
    },
    rule=_check_storage,
)


def _check_mounts(table: MapNode, notes: ProblemNotes) -> None:
    for key, _ in table.entries:
        if re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*:)?//[^/?#]", key.text):
            hint = "the place on the node comes first, what is put there second"
            notes.add(
                key.mark, f"nothing can be put at {key.text}", expected="a path", suggestion=hint
            )


_MOUNTS = TableRule(other=OneOfRule(shapes=(TEXT, STORAGE)), rule=_check_mounts)

# service and pool

_PROBE = TableRule(
    fields={
        "path": text("a path that begins with /", pattern="^/"),
        "initial_delay_seconds": number(),
        "timeout_seconds": number(),
        "endpoint_probe_interval_seconds": number(),
        "consecutive_failure_threshold_timeout": number(),
        "post_data": OneOfRule(
            shapes=(text("JSON", check=lambda value: _check_json(value)), ANY_TABLE)
        ),
        "headers": _TEXT_TABLE,
    },
    required=("path",),
)
_QPS = OneOfRule(shapes=(number(0), TableRule(other=number(0), key=r"[A-Z0-9]+(:[0-9]+)?")))


def _check_policy(table: MapNode, notes: ProblemNotes) -> None:
    least, most = _number(table, "min_replicas"), _number(table, "max_replicas")
    goal = table.get("target_qps_per_replica")
    if most is not None and least is not None and most < least:
        notes.add(table.mark, f"max_replicas is {most:g}, below min_replicas ({least:g})")
    elif goal is not None and not is_null(goal) and most is None:
        notes.add(goal.mark, "`target_qps_per_replica` needs `max_replicas`")
    elif (goal is None or is_null(goal)) and most is not None and most != least:
        hint = "write `target_qps_per_replica`, or one number of replicas"
        notes.add(table.mark, "a number of replicas that varies needs a goal", suggestion=hint)


_POLICY = TableRule(
    fields={
        "min_replicas": whole(0),
        "max_replicas": whole(0),
        "num_overprovision": whole(0),
        "target_qps_per_replica": _QPS,
        "dynamic_ondemand_fallback": FLAG,
        "base_ondemand_fallback_replicas": whole(0),
        "spot_placer": choice(("dynamic_fallback",)),
        "upscale_delay_seconds": number(),
        "downscale_delay_seconds": number(),
    },
    required=("min_replicas",),
    rule=_check_policy,
)


def _check_pool(table: MapNode, notes: ProblemNotes) -> None:
    workers, least, most = (
        _number(table, key) for key in ("workers", "min_workers", "max_workers")
    )
    if workers is None and least is None and most is None:
        notes.add(
            table.mark,
            "the pool has no size",
            expected="`workers`, or `min_workers` and `max_workers`",
        )
    for key in ("min_workers", "queue_length_threshold"):
        if _number(table, key) is not None and most is None:
            notes.add(table.mark, f"`{key}` needs `max_workers`")
    least = workers if least is None else least
    if most is None and any(
        _number(table, f"{way}scale_delay_seconds") is not None for way in ("up", "down")
    ):
        notes.add(table.mark, "a delay of scaling needs `max_workers`")
    if most is not None and most < (1 if least is None else least):
        notes.add(table.mark, f"max_workers is {most:g}, below the least number of workers")


POOL = TableRule(
    fields={
        "workers": whole(0),
        "min_workers": whole(0),
        "max_workers": whole(0),
        "queue_length_threshold": whole(1),
        "upscale_delay_seconds": number(0),
        "downscale_delay_seconds": number(0),
    },
    rule=_check_pool,
)


def _check_service(table: MapNode, notes: ProblemNotes) -> None:
    there = {key.text for key, value in table.entries if not is_null(value)}
    probe = table.get("readiness_probe")
    if probe is not None and is_null(probe):
        notes.add(
            probe.mark,
            "there is nothing in `readiness_probe`",
            expected="a path that begins with /, or a table",
        )
    for one, other in (
        ("replicas", "replica_policy"),
        ("replicas", "workers"),
        ("pool", "replica_policy"),
    ):
        if {one, other} <= there:
            notes.add(
                table.mark, f"`{one}` and `{other}` are both there", suggestion="keep one of them"
            )
    policy = table.get("replica_policy")
    goal = policy.get("target_qps_per_replica") if isinstance(policy, MapNode) else None
    balanced = _text(table, "load_balancing_policy")
    if isinstance(goal, MapNode) != (balanced == "instance_aware_least_load"):
        text = (
            "`load_balancing_policy: instance_aware_least_load` and a table of "
            "`target_qps_per_replica`"
        )
        notes.add(table.mark, f"{text} belong together")


SERVICE = TableRule(
    nulls=True,
    fields={
        "readiness_probe": OneOfRule(
            shapes=(text("a path that begins with /", pattern="^/"), _PROBE)
        ),
        "load_balancer": TableRule(fields={"stream_timeout_seconds": number()}),
        "pool": POOL,
        "replica_policy": _POLICY,
        "ports": whole(1, 65_535),
        "replicas": whole(),
        "workers": whole(),
        "load_balancing_policy": choice(
            ("round_robin", "least_load", "instance_aware_least_load"), any_case=False
        ),
        "tls": TableRule(
            fields={"keyfile": TEXT, "certfile": TEXT}, required=("keyfile", "certfile")
        ),
    },
    rule=_check_service,
)

# config

_HOOK = TableRule(
    fields={
        "run": text(
            "a script of at most 16 KiB",
            check=lambda value: "" if 0 < len(value) <= 16_384 else "its length",
        ),
        "events": ListRule(
            item=choice(("stop", "preemption", "down"), any_case=False), least=1, unique=True
        ),
        "timeout": whole(1),
    },
    required=("run",),
)
_FREE = TableRule(other=AnyRule())
_DOCKER = choice(("ALL", "BUILD"), any_case=False)
_POD: dict[str, ShapeRule] = {
    "pod_config": _FREE,
    "provision_timeout": whole(),
    "custom_metadata": _FREE,
}
_IDENTITY = OneOfRule(shapes=(TEXT, _FREE, ListRule(item=_FREE)))
CONFIG = TableRule(
    other=AnyRule(),
    fields={
        "hooks": ListRule(item=_HOOK, most=32),
        "docker": TableRule(fields={"run_options": _TEXTS}),
        "nvidia_gpus": TableRule(fields={"disable_ecc": FLAG}),
        "active_workspace": TEXT,
        "gcp": TableRule(
            fields={
                "managed_instance_group": TableRule(
                    fields={"run_duration": whole(), "provision_timeout": whole()},
                    required=("run_duration",),
                ),
                "enable_gvnic": FLAG,
                "enable_gpu_direct": FLAG,
                "placement_policy": TEXT,
                "vpc_name": optional(
                    text("a network's name", pattern=r"^(?:[-a-z0-9]+/)?[-a-z0-9]+$")
                ),
                "subnet_names": optional(_TEXTS),
            }
        ),
        "azure": TableRule(fields={"vpc_name": optional(TEXT), "remote_identity": _IDENTITY}),
        "kubernetes": TableRule(
            other=AnyRule(),
            fields={
                **_POD,
                "kueue": TableRule(fields={"local_queue_name": TEXT, "admission_timeout": whole()}),
                "quota": TableRule(fields={"queue": TEXT}, other=AnyRule()),
                "dws": TableRule(
                    fields={
                        "enabled": FLAG,
                        "max_run_duration": OneOfRule(
                            shapes=(
                                text("a time such as 10m", pattern="^[0-9]+[mhdwMHDW]?$"),
                                whole(),
                            )
                        ),
                    }
                ),
                "remote_identity": OneOfRule(shapes=(TEXT, _TEXT_TABLE)),
                "set_pod_resource_limits": OneOfRule(shapes=(FLAG, number(1))),
                "enable_docker": OneOfRule(
                    shapes=(
                        FLAG,
                        _DOCKER,
                        TableRule(
                            fields={"mode": _DOCKER, "cache_volume": TEXT}, required=("mode",)
                        ),
                    )
                ),
            },
        ),
        "ssh": TableRule(fields=_POD),
        "slurm": TableRule(
            other=AnyRule(),
            fields={
                "sbatch_options": _FREE,
                "quota": TableRule(fields={"queue": TEXT, "account": TEXT}, other=AnyRule()),
                "cpu_partition": TEXT,
            },
        ),
        "vast": TableRule(fields={"datacenter_only": FLAG, "create_instance_kwargs": _FREE}),
    },
)

# The whole file.

_MANAGED = OneOfRule(shapes=(TEXT, TableRule(other=TableRule(fields={"mount_path": TEXT}), most=1)))
_VOLUME_MOUNT = TableRule(
    nulls=True,
    fields={
        "path": TEXT,
        "volume_name": TEXT,
        "is_ephemeral": FLAG,
        "sub_path": TEXT,
        "volume_config": TableRule(
            fields={"cloud": choice(CLOUDS), "region": optional(TEXT), "zone": optional(TEXT)},
            other=AnyRule(),
        ),
    },
)
_SECRET_ITEM = text("secrets:NAME", pattern="^secrets:.")
_SIZES = TableRule(other=number(), least=1, most=1)


def _check_secrets(table: MapNode, notes: ProblemNotes) -> None:
    for key, value in table.entries:
        if key.text.startswith("secrets:") and not is_null(value):
            notes.add(
                value.mark,
                f"{key.text} is a reference and has no value",
                suggestion="delete the value",
            )


def _check_task(table: MapNode, notes: ProblemNotes) -> None:
    for key, value in table.entries:
        if key.text in ("envs", "inputs", "outputs") and is_null(value):
            notes.add(key.mark, f"there is nothing in `{key.text}`", suggestion="delete the line")
    service, pool = table.get("service"), table.get("pool")
    if service is not None and pool is not None and not is_null(service) and not is_null(pool):
        notes.add(pool.mark, "`service` and `pool` are both there", suggestion="keep one of them")
    login = {f"SKYPILOT_DOCKER_{part}" for part in ("USERNAME", "PASSWORD", "SERVER")}
    there = {name: login & _names(table.get(name)) for name in ("envs", "secrets")}
    for name, known in there.items():
        if known and (known != login or all(there.values())):
            missing = ", ".join(sorted(login - known)) or "they are also elsewhere"
            notes.add(
                table.mark, f"the SKYPILOT_DOCKER_ variables must all be in `{name}`: {missing}"
            )
    volumes = table.get("volumes")
    for key, value in volumes.entries if isinstance(volumes, MapNode) else ():
        if isinstance(value, ListNode):
            notes.add(
                value.mark,
                f"`volumes.{key.text}` is a list",
                expected="a volume's name, or a table",
            )


TASK_KEYS: Mapping[str, ShapeRule] = {
    "name": TEXT,
    "workdir": OneOfRule(
        shapes=(TEXT, TableRule(fields={"url": TEXT, "ref": TEXT}, required=("url",)))
    ),
    "event_callback": TEXT,
    "num_nodes": whole(1, exact=True),
    "resources": NEEDS,
    "file_mounts": _MOUNTS,
    "service": SERVICE,
    "pool": POOL,
    "setup": TEXT,
    "run": TEXT,
    "envs": TableRule(other=AnyRule(), key=VARIABLE),
    "secrets": OneOfRule(
        shapes=(TableRule(other=AnyRule(), rule=_check_secrets), ListRule(item=_SECRET_ITEM)),
    ),
    "managed_secrets": ListRule(item=_MANAGED),
    "inputs": _SIZES,
    "outputs": _SIZES,
    "file_mounts_mapping": ANY_TABLE,
    "config": CONFIG,
    "volumes": ANY_TABLE,
    "volume_mounts": ListRule(item=_VOLUME_MOUNT),
    "api_server_access": FLAG,
    "_metadata": ANY_TABLE,
}
HINTS = {
    **{
        key: "it belongs into `resources`; is it indented too little?"
        for key in NEEDS.fields
        if key not in TASK_KEYS
    },
    "spot_recovery": "it is called `job_recovery` now",
    "env": "write `envs`",
    "nodes": "write `num_nodes`",
    "gpus": "write `resources: {accelerators: …}`",
    "experimental": "write `config`",
}
TASK = TableRule(fields=TASK_KEYS, nulls=True, hints=HINTS, rule=_check_task)

_SAFE_NAME = text("a name of letters, digits, - and _", pattern=r"^[\w-]+$")
_DELAY = OneOfRule(shapes=(text("a time such as 30s", pattern=_LENGTH_S), whole(0)))
SERIAL_HEADER = TableRule(
    fields={"name": TEXT, "execution": choice(("serial",), any_case=False)}, nulls=True
)
GROUP_HEADER = TableRule(
    nulls=True,
    fields={
        "name": _SAFE_NAME,
        "execution": choice(("parallel",), any_case=False),
        "placement": choice(("SAME_INFRA",)),  # of the first releases, which is not read any more
        "primary_tasks": ListRule(item=TEXT),
        "termination_delay": OneOfRule(shapes=(*_DELAY.shapes, TableRule(other=_DELAY))),
        "inter_connection": FLAG,
    },
    required=("name",),
)
VOLUME = TableRule(
    nulls=True,
    fields={
        "name": TEXT,
        "type": choice(("k8s-pvc", "k8s-hostpath", "runpod-network-volume"), any_case=False),
        "infra": INFRA,
        "size": SIZE,
        "use_existing": FLAG,
        "config": TableRule(
            other=AnyRule(),
            fields={
                "storage_class_name": TEXT,
                "access_mode": choice(
                    ("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"),
                    any_case=False,
                ),
                "namespace": TEXT,
                "host_path": TEXT,
                "cleanup_on_deletion": FLAG,
            },
        ),
        "labels": _TEXT_TABLE,
    },
    required=("name", "type"),
)


def _check_json(value: str) -> str:
    import json

    try:
        json.loads(value)
    except ValueError as error:
        return f"this is not JSON: {error}"
    except RecursionError:
        return "this is nested too deeply"
    return ""


def _text(table: MapNode, key: str) -> str:
    node = table.get(key)
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else ""


def _number(table: MapNode, key: str) -> float | None:
    node = table.get(key)
    value = to_value(node) if node is not None else None
    return value if isinstance(value, int | float) else None


def _names(node: Node | None) -> set[str]:
    return {key.text for key, _ in node.entries} if isinstance(node, MapNode) else set()


def is_safe_name(name: str) -> bool:
    """Whether a job of a group can be called so."""
    return re.fullmatch(r"[\w-]+", name) is not None
