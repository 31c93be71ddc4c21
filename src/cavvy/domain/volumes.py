"""Volumes that Cavvy created at a provider and that outlive their jobs. While no job pays for a
volume, the volume has a bill of its own, unless it is a folder of this machine.
"""

from datetime import UTC, date, datetime

from cavvy.domain.events import Charge
from cavvy.domain.ledger import LedgerSubject
from cavvy.domain.offers import ExtraPrice
from cavvy.domain.values import Struct


class KeptVolume(Struct, frozen=True, kw_only=True):
    """A volume of this installation, as its provider reports it. `made_for` is the gang for which
    the volume was created, and `used_by` lists the gangs that used the volume, if the provider
    recorded these gangs. Without a `price`, the cost of the volume is unknown and nothing is
    charged.
    """

    id: str
    name: str
    region: str
    zone: str = ""
    type: str = ""
    size_gib: int
    created_at: datetime
    made_for: str = ""  # a gang
    project: str = ""  # as stated by the volume's own label
    used_by: tuple[str, ...] = ()
    price: ExtraPrice | None = None


class VolumeFolder(Struct, frozen=True, kw_only=True):
    """A named volume that is a folder of this machine or of an own host: how many files it has, and
    how many bytes of the disk they take. If the host does not answer, `problem` is the reason, and
    the sizes are None.
    """

    name: str
    host: str = ""  # "" on this machine
    files: int | None = None
    size_bytes: int | None = None
    changed_at: datetime | None = None  # the newest of its files
    problem: str = ""


def find_time(seconds: float) -> datetime | None:
    """Return the time of a file, in seconds since 1970, or None if no year has it: jobs set these
    times."""
    try:
        return datetime.fromtimestamp(int(seconds), UTC)
    except (OverflowError, ValueError, OSError):
        return None


class VolumeTerms(Struct, frozen=True, kw_only=True):
    """The monthly cost of a volume from the time `since` on, and the source of the volume's
    price."""

    since: datetime
    size_gib: int
    type: str
    micros_per_month: int
    source: str = ""
    as_of: date | None = None


class VolumeUse(Struct, frozen=True, kw_only=True):
    """A period in which a job pays for the volume. `until` is None while the job's attempt is
    open."""

    since: datetime
    until: datetime | None


class VolumeOwner(Struct, frozen=True, kw_only=True):
    """The project and the user of the job for which a volume was created."""

    project: str
    user: str
    tags: dict[str, str]


class VolumeBill(Struct, frozen=True, kw_only=True):
    """The bill of a volume for the time in which no job pays for it, and the facts from which the
    bill is computed. `lines` is the sum of the ledger entries whose subject is `subject`. The
    provider last listed the volume at `seen_at`.
    """

    subject: LedgerSubject
    since: datetime
    seen_at: datetime
    gangs: tuple[str, ...] = ()
    terms: tuple[VolumeTerms, ...] = ()
    lines: tuple[Charge, ...] = ()
    version: int = 0
