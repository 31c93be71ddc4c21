"""A figure with the place where it can be checked."""

from datetime import date

from cavvy.domain.values import Struct


class Fact(Struct, frozen=True, kw_only=True):
    """A figure of a report. `source` names a price list, a data sheet, a publication, or the
    user's own file; `as_of` is the day of the source, or None if it names none. `formula` says how
    the figure was computed from others; it is "" for a figure that the source itself states.
    """

    name: str
    value: float
    unit: str
    source: str
    as_of: date | None = None
    formula: str = ""
