"""Hints about misplaced keys: other sections of the file, or another tool's file."""

from cavvy.spec.fields.kinds import (
    EitherKind,
    ListKind,
    MapKind,
    SectionSpec,
    ValueKind,
)


def elsewhere(key: str, path: str) -> str:
    """The correct section of `key`, as advice; "" if there is none."""
    from cavvy.spec.fields.task import TASK

    if path == "resources.gpu":
        return f"write `gpu: {key}:COUNT`"  # such as {H100: 8} of another tool
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
    """Every section contained in `kind`, itself first, in the order of the fields."""
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
