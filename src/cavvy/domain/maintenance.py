"""Maintenance of the installation's own hosts: what operators have ordered for them, and
reservations."""

from datetime import datetime

from cavvy.domain.values import Struct, field


class NodeState(Struct, frozen=True, kw_only=True):
    """What an operator has ordered for a host. `name` is that of the `Host`.

    No new work is placed on a cordoned host. A host with `drain_by` is drained: its work leaves
    until this time. `user` and `reason` state who ordered this, and why. `sick` contains the
    devices on which no new work is placed, with what is wrong with each.
    """

    name: str
    cordoned_at: datetime | None = None
    user: str = ""
    reason: str = ""
    drain_by: datetime | None = None
    sick: dict[str, str] = field(default_factory=dict)
    version: int = 0

    def describe(self) -> str:
        """Return why the host accepts no new work, or "" if it does."""
        if self.cordoned_at is None:
            return ""
        what = "cordoned" if self.drain_by is None else "drained"
        return f"{what} by {self.user or 'an operator'}{self.reason and f' ({self.reason})'}"


class ReservedPart(Struct, frozen=True):
    """Devices of a host that are reserved, or the whole host if there are none."""

    host: str
    devices: tuple[str, ...] = ()


class Reservation(Struct, frozen=True, kw_only=True):
    """Parts of hosts that only jobs of one project, and of the projects below it, use during a
    time. With `user`, only the jobs of this user. `made_by` and `reason` state who reserved them,
    and why.
    """

    name: str
    project: str
    user: str = ""
    parts: tuple[ReservedPart, ...]
    begins_at: datetime
    ends_at: datetime
    made_by: str = ""
    reason: str = ""
    version: int = 0

    def describe(self, reader: str | None = None) -> str:
        """Return which jobs may use the parts, and when. If `reader` is given, the text is for the
        members of this project, who may not see the names of others."""
        user = f", user {self.user}," if self.user else ""
        who = f"project {self.project}{user}"
        if reader not in (None, self.project):
            who = "another project"
        times = f"{self.begins_at:%Y-%m-%d %H:%M} to {self.ends_at:%Y-%m-%d %H:%M} UTC"
        return f"reserved for {who} from {times}"
