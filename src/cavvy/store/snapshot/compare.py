"""Compares two snapshots, offer by offer."""

from collections.abc import Iterator

from cavvy.domain.values import Struct
from cavvy.store.snapshot.reader import CatalogSnapshot


class OfferChange(Struct, frozen=True, kw_only=True):
    """One offer that was added or removed, or whose price changed. Rates are in micro-US-dollars
    per hour.
    """

    kind: str
    key: str
    old: int | None = None
    new: int | None = None

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.new is not None and self.old else None


def compare(
    old: CatalogSnapshot, new: CatalogSnapshot, provider: str | None = None
) -> list[OfferChange]:
    """List the changes from `old` to `new`. Changed prices come first, the largest change first.
    New and removed offers come after the changed prices, sorted by name.
    """
    before, after = dict(old.rates(provider)), dict(new.rates(provider))
    moved = [
        OfferChange(
            kind="dearer" if after[key] > rate else "cheaper", key=key, old=rate, new=after[key]
        )
        for key, rate in before.items()
        if key in after and after[key] != rate
    ]
    moved.sort(key=lambda change: (-_size(change), change.key))
    return [*moved, *_only("new", after, before), *_only("gone", before, after)]


def _only(kind: str, here: dict[str, int], there: dict[str, int]) -> Iterator[OfferChange]:
    for key in sorted(here.keys() - there.keys()):
        yield OfferChange(
            kind=kind, key=key, **({"new": here[key]} if kind == "new" else {"old": here[key]})
        )


def _size(change: OfferChange) -> float:
    """Return the factor by which the price grew or shrank."""
    ratio = change.ratio or 1.0
    return ratio if ratio >= 1 else 1 / ratio
