"""Values: immutable records of named fields, which the whole control plane uses.

A value is a `Struct` of msgspec, which compiled code creates, copies, compares and hashes (ADR
0002): `class Offer(Struct, frozen=True, kw_only=True)`. Programs that run on nodes can import only
the standard library, so their records are data classes.
"""

from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec import Struct, field, structs
from msgspec.structs import fields

_S = TypeVar("_S", bound=Struct)
_T = TypeVar("_T")

if TYPE_CHECKING:
    from dataclasses import replace  # mypy checks the names and types of the changes
else:
    import dataclasses

    def replace(value, /, **changes):
        """Return a copy of the value, with these fields changed."""
        if isinstance(value, Struct):
            return structs.replace(value, **changes)
        return dataclasses.replace(value, **changes)


def view(kind: type[_T], source: object, /, **given: object) -> _T:
    """Create a struct of type `kind`. The value of a field comes from `given`, or else from the
    attribute of `source` with the same name, or else from the field's default.
    """
    for name in cast(type[Struct], kind).__struct_fields__:
        if name not in given and hasattr(source, name):
            given[name] = getattr(source, name)
    return kind(**given)


def copy_fields(target: _S, source: object, *names: str) -> _S:
    """Return `target` with these fields as they are in `source`."""
    return structs.replace(target, **{name: getattr(source, name) for name in names})


def combine(one: _S, other: _S, sign: int = 1) -> _S:
    """Return the sums of the fields of two records of numbers or, if `sign` is -1, their
    differences."""
    pairs = zip(structs.astuple(one), structs.astuple(other), strict=True)
    names = one.__struct_fields__
    return type(one)(**{n: a + sign * b for n, (a, b) in zip(names, pairs, strict=True)})


def asdict(value: Struct) -> dict[str, Any]:
    """Return the value's fields by their names. Structs in the fields are also converted to
    dictionaries, even inside lists, tuples and dictionaries.
    """
    return {name: _plain(item) for name, item in structs.asdict(value).items()}


def _plain(item: Any) -> Any:
    if isinstance(item, Struct):
        return asdict(item)
    if isinstance(item, dict):
        return {key: _plain(each) for key, each in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_plain(each) for each in item)
    return item


__all__ = ["Struct", "asdict", "combine", "copy_fields", "field", "fields", "replace", "view"]
