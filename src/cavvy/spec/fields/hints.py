"""Where a key belongs that stands in the wrong place: other sections of the file, or another
tool's file.
"""

from cavvy.spec.fields.kinds import (
    EitherKind,
    ListKind,
    MapKind,
    SectionSpec,
    ValueKind,
    hints_for,
)

# Keys at the top of other tools' files.
TOP_HINTS = hints_for(
    {
        "write `resources: {gpu: …}`": "accelerators gpus",
        "write `run`": "command entrypoint cmd",
        "write `run: |` with one command in each line": "commands",
        "write `run: |`": "script",
        "put them into `run`": "args",
        "write `nodes`": "num_nodes node_count replicas",
        "write `env`": "envs environment environment_variables",
        "write `params` or `env`": "vars",
        "write `params`": "parameters",
        "write `inputs`, as in `inputs: [{source: data, target: data}]`": "file_mounts",
        "write `inputs` and `outputs`": "storage_mounts mounts",
        "write `volumes`": "volume volume_mounts",
        "write `workdir`": "files working_dir",
        "write `workdir: {git: URL, commit: …}`": "repos repo",
        "write `image`": "docker_image image_id container",
        "write `tags`": "labels",
        "write `resources: {spot: …}`": "spot_policy",
        "write `resources: {spot: only}`": "use_spot",
        "write `limits: {duration: …}`": "max_duration timeout time",
        "write `grace`": "stop_duration",
        "write `limits: {idle: …}`": "idle_duration",
        "write `resources: {max_price: …}`": "max_price",
        "write `resources: {providers: […]}`": "backends cloud",
        "write `schedule`": "cron",
        "write `secrets`": "secret",
        "delete it: every file describes a task": "type kind",
        "delete it: this is no Kubernetes object": "apiVersion",
        "serving is not part of a task file": "service ports",
    }
)


def elsewhere(key: str, path: str) -> str:
    """Where the file does have `key`, as advice; "" where it has it nowhere."""
    from cavvy.spec.fields.task import TASK

    if path == "resources.gpu":
        return f"write `gpu: {key}:COUNT`"  # as in {H100: 8} of another tool
    for section in sections(TASK):
        if (
            section.path != path
            and section.path.count(".") < 2
            and any(each.name == key for each in section.fields)
        ):
            if section.path == "":
                return f"`{key}` belongs to the top of the file"
            if "NAME" not in section.path:
                return f"`{key}` belongs under `{section.path}`"
    return ""


def sections(kind: ValueKind) -> list[SectionSpec]:
    """Every section that `kind` contains, itself first, in the order of the fields."""
    match kind:
        case SectionSpec():
            inner = [each for field in kind.fields for each in sections(field.kind)]
            # Alternatives have the same tables.
            return list({id(each): each for each in (kind, *inner)}.values())
        case ListKind():
            return sections(kind.item)
        case MapKind():
            return sections(kind.value)
        case EitherKind():
            return [each for option in kind.kinds for each in sections(option)]
        case _:
            return []
