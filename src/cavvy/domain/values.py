"""Values: records of named fields that all of the control plane is written in.

A value is a `Struct` of msgspec, which is made, copied, compared and hashed by compiled code (ADR
0075): `class Offer(Struct, frozen=True, kw_only=True)`. Programs that run on nodes have only the
standard library; their records are data classes.
"""

from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import asdict, fields

if TYPE_CHECKING:
    from dataclasses import replace  # of which mypy checks the names and types of the changes
else:
    import dataclasses

    from msgspec import structs

    def replace(value, /, **changes):
        """A copy of the value, with these fields changed."""
        if isinstance(value, Struct):
            return structs.replace(value, **changes)
        return dataclasses.replace(value, **changes)


__all__ = ["Struct", "asdict", "field", "fields", "replace"]
