"""Where a key belongs that stands in the wrong place: other sections of the file, or another
tool's file.
"""

from cavvy.spec.fields.kinds import EitherKind, FieldSpec, ListKind, MapKind, SectionSpec, ValueKind

# Keys at the top of other tools' files -> what to write here.
TOP_HINTS = {
    "accelerators": "write `resources: {gpu: …}`",
    "gpus": "write `resources: {gpu: …}`",
    "command": "write `run`",
    "commands": "write `run: |` with one command in each line",
    "script": "write `run: |`",
    "entrypoint": "write `run`",
    "cmd": "write `run`",
    "args": "put them into `run`",
    "num_nodes": "write `nodes`",
    "node_count": "write `nodes`",
    "replicas": "write `nodes`",
    "envs": "write `env`",
    "environment": "write `env`",
    "environment_variables": "write `env`",
    "vars": "write `params` or `env`",
    "parameters": "write `params`",
    "file_mounts": "write `inputs`, as in `inputs: [{source: data, target: data}]`",
    "storage_mounts": "write `inputs` and `outputs`",
    "mounts": "write `inputs` and `outputs`",
    "volume": "write `volumes`",
    "volume_mounts": "write `volumes`",
    "files": "write `workdir`",
    "repos": "write `workdir: {git: URL, commit: …}`",
    "repo": "write `workdir: {git: URL, commit: …}`",
    "working_dir": "write `workdir`",
    "docker_image": "write `image`",
    "image_id": "write `image`",
    "container": "write `image`",
    "labels": "write `tags`",
    "spot_policy": "write `resources: {spot: …}`",
    "use_spot": "write `resources: {spot: only}`",
    "max_duration": "write `limits: {duration: …}`",
    "stop_duration": "write `grace`",
    "timeout": "write `limits: {duration: …}`",
    "idle_duration": "write `limits: {idle: …}`",
    "max_price": "write `resources: {max_price: …}`",
    "time": "write `limits: {duration: …}`",
    "backends": "write `resources: {providers: […]}`",
    "cloud": "write `resources: {providers: […]}`",
    "cron": "write `schedule`",
    "secret": "write `secrets`",
    "type": "delete it: every file describes a task",
    "kind": "delete it: every file describes a task",
    "apiVersion": "delete it: this is no Kubernetes object",
    "service": "serving is not part of a task file",
    "ports": "serving is not part of a task file",
}


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


def sections(kind: ValueKind[object]) -> list[SectionSpec[object]]:
    """Every section that `kind` contains, itself first, in the order of the fields."""
    match kind:
        case SectionSpec():
            inner = [each for field in kind.fields for each in sections(_kind(field))]
            return list(
                {id(each): each for each in (kind, *inner)}.values()
            )  # alternatives have the same tables
        case ListKind():
            return sections(kind.item)
        case MapKind():
            return sections(kind.value)
        case EitherKind():
            return [each for option in kind.kinds for each in sections(option)]
        case _:
            return []


def _kind(field: FieldSpec[object]) -> ValueKind[object]:
    return field.kind
