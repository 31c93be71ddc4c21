"""Stores a new snapshot in the state folder: from a file, a folder or a URL, or made from newly
fetched offers.

Compares two snapshots, offer by offer.
"""

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct
from cavvy.http_client import HttpClient, NoReply, ReplyTooLong, TargetDenied
from cavvy.store.snapshot import choose
from cavvy.store.snapshot.layout import SnapshotError
from cavvy.store.snapshot.reader import CatalogSnapshot
from cavvy.store.snapshot.writer import EgressPrice, write_snapshot

_MOST_BYTES = 512 << 20
_TIMEOUT_S, _LIMIT_S = 60, 3600  # seconds without any byte, and for the whole file


def refresh_from(place: str, *, sha256: str | None = None) -> Path:
    """Copy a snapshot from a file, a folder or a URL, check the copy, and use the copy from now on.
    Returns its path.

    If the new snapshot is not usable, raise SnapshotError and keep the current catalog.
    """
    with _new_file() as new:
        if "://" in place:
            _download(place, new)
        else:
            _copy(Path(place).expanduser(), new)
        _check_hash(new, place, sha256)
        choose.put_in_place(new, choose.refreshed_path(), source=place)
    return choose.refreshed_path()


def refresh_offers(
    fetched: Mapping[str, Sequence[Offer]], *, today: date, partial: Collection[str] = ()
) -> Path:
    """Create and use a new snapshot: the fetched offers replace all old offers of their providers.
    For a provider in `partial`, the fetched offers replace only the old offers with the same keys.
    """
    with _new_file() as new:
        with CatalogSnapshot.open() as old:
            write_snapshot(
                new,
                _merged(old, fetched, partial),
                _egress(old),
                as_of=today,
            )
        choose.put_in_place(new, choose.refreshed_path(), source="the new catalog")
    return choose.refreshed_path()


def _merged(
    old: CatalogSnapshot, fetched: Mapping[str, Sequence[Offer]], partial: Collection[str]
) -> Iterator[Offer]:
    """Yield the new offers, then the old offers. If several offers have equal keys, the writer
    keeps the first of these offers.
    """
    for offers in fetched.values():
        yield from offers
    for offer in old.all_offers():
        if offer.provider not in fetched or offer.provider in partial:
            yield offer


def _egress(old: CatalogSnapshot) -> Iterator[EgressPrice]:
    for provider, region, target, price, source, as_of in old.egress_rows():
        yield EgressPrice(
            provider=provider,
            region=region,
            target=target,
            per_gb=price,
            source=source,
            as_of=as_of,
        )


@contextmanager
def _new_file() -> Iterator[Path]:
    """Yield the path of a new file next to the catalog. Also delete files that interrupted
    refreshes have left behind.
    """
    folder = choose.refreshed_path().parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(".catalog.*.new"):
            if not _is_running(left.name.split(".")[2]):
                left.unlink(missing_ok=True)
        new = folder / f".catalog.{os.getpid()}.new"
        new.unlink(missing_ok=True)
        try:
            yield new
        finally:
            new.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise SnapshotError(f"the new catalog cannot be written to {folder}: {error}") from error


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _copy(place: Path, new: Path) -> None:
    if place.is_dir():
        found = [place / name for name in ("catalog.db", "snapshot.db") if (place / name).is_file()]
        if not found:
            raise SnapshotError(f"{place} contains neither catalog.db nor snapshot.db")
        place = found[0]
    if not place.is_file():
        raise SnapshotError(
            f"the file {place} does not exist; use a snapshot file, a folder that "
            "contains a snapshot file, or a URL"
        )
    shutil.copyfile(place, new)


def _download(url: str, new: Path) -> None:
    if url.split("://", 1)[0] not in ("http", "https"):
        raise SnapshotError(f"{url} is not an http or https URL")
    client = HttpClient(redirects=True, idle_s=_TIMEOUT_S, limit_s=_LIMIT_S, most_bytes=_MOST_BYTES)
    try:
        with new.open("wb") as file:
            reply = client.send("GET", url, into=file)
    except ReplyTooLong as error:
        raise SnapshotError(f"{error}; {url} is not a catalog") from error
    except (NoReply, TargetDenied) as error:
        raise SnapshotError(f"{url} cannot be read: {error}") from error
    if reply.status != 200:
        raise SnapshotError(f"{url} cannot be read: HTTP {reply.status} {reply.reason}")


def _check_hash(new: Path, place: str, sha256: str | None) -> None:
    if sha256 is None:
        return
    found = hashlib.sha256(new.read_bytes()).hexdigest()
    if found != sha256.lower().strip():
        raise SnapshotError(f"{place} has SHA-256 {found}, not {sha256}; it was not used")


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
