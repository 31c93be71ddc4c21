"""Suggests fixes for misplaced keys: keys that belong to another section, or that only other tools
have.
"""

from cavvy.spec.fields.kinds import (
    EitherKind,
    ListKind,
    MapKind,
    SectionSpec,
    ValueKind,
)
from cavvy.spec.fields.task import TASK


def elsewhere(key: str, path: str) -> str:
    """Return a suggestion that names the section to which `key` belongs, or "" if no section has
    such a key.
    """
    if path == "resources.gpu":
        # The value has the form of another tool, such as {H100: 8}.
        return f"write `gpu: {key}:COUNT`"
    for section in sections(TASK):
        if (
            section.path != path
            and section.path.count(".") < 2
            and any(each.name == key for each in section.fields)
        ):
            if section.path == "":
                return f"`{key}` belongs at the top of the file"
            if "NAME" not in section.path:
                return f"`{key}` belongs under `{section.path}`"
    return ""


def sections(kind: ValueKind) -> list[SectionSpec]:
    """Return every section in `kind`, in the order of the fields. If `kind` is itself a section,
    the result begins with it.
    """
    match kind:
        case SectionSpec():
            inner = [each for field in kind.fields for each in sections(field.kind)]
            # Several fields can share a table, which must occur only once in the result.
            return list({id(each): each for each in (kind, *inner)}.values())
        case ListKind():
            return sections(kind.item)
        case MapKind():
            return sections(kind.value)
        case EitherKind():
            return [each for option in kind.kinds for each in sections(option)]
        case _:
            return []
