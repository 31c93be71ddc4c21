"""Which settings a device gets: of those for its site, its labels and itself, the last one wins."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from cavvy.domain.edge import EdgeDevice, EdgeSettings
from cavvy.domain.values import Struct, replace

MOST_VARIABLES = 64  # that are set in one place, also those that are secrets
_MOST_BYTES = 32 * 1024  # of the values of those that are not


class GivenSetting(Struct, frozen=True, kw_only=True):
    """A setting of a device, and the name of the settings that it comes from. `kind` is option,
    variable or secret. A secret has the time when it was set, and no value; without this time, the
    project does not have it any more."""

    name: str
    kind: str
    source: str
    value: float | str = ""
    set_at: datetime | None = None


class DeviceSettings(Struct, frozen=True, kw_only=True):
    """The settings of a device. Their `revision` is "" if there are none, and changes with each of
    them, also if a secret is set anew; it tells nothing about the value of a secret."""

    revision: str = ""
    given: tuple[GivenSetting, ...] = ()

    def of(self, kind: str) -> Mapping[str, float | str]:
        """Return the values of one kind by name; those of secrets are ""."""
        return {each.name: each.value for each in self.given if each.kind == kind}

    @property
    def secrets(self) -> Sequence[str]:
        """The names of the secrets that the project has."""
        return [each.name for each in self.given if each.kind == "secret" and each.set_at]


NO_SETTINGS = DeviceSettings()


def merge_settings(
    device: EdgeDevice, rows: Mapping[str, EdgeSettings], secrets: Mapping[str, datetime]
) -> DeviceSettings:
    """Return what a device gets: what is set for it precedes what is set for one of its labels (of
    several, the last by name), and that what is set for its site. `secrets` has the times when the
    project's secrets were set."""
    labels = sorted(f"label/{label}={value}" for label, value in device.labels.items())
    found: dict[tuple[bool, str], GivenSetting] = {}
    for source in (f"site/{device.site}", *labels, f"device/{device.name}"):
        row = rows.get(source)
        if row is None:
            continue
        for name, option in row.options.items():
            made = GivenSetting(name=name, kind="option", source=source, value=option)
            found[True, name] = made
        for name, value in row.variables.items():
            made = GivenSetting(name=name, kind="variable", source=source, value=value)
            found[False, name] = made
        for name in row.secrets:
            set_at = secrets.get(name)
            made = GivenSetting(name=name, kind="secret", source=source, set_at=set_at)
            found[False, name] = made
    if not found:
        return NO_SETTINGS
    given = tuple(found[key] for key in sorted(found))
    told = [[each.kind, each.name, each.value, str(each.set_at)] for each in given]
    revision = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return DeviceSettings(revision=revision, given=given)


def find_excess(row: EdgeSettings) -> str:
    """Return why these are too many settings, or ""."""
    count = len(row.variables) + len(row.secrets)
    if count > MOST_VARIABLES:
        return f"it would have {count} variables; expected at most {MOST_VARIABLES}"
    size = sum(len(each.encode()) for each in row.variables.values())
    if size > _MOST_BYTES:
        return f"its variables would have {size:,} bytes; expected at most {_MOST_BYTES:,}"
    return ""


def change_row(
    row: EdgeSettings,
    options: Mapping[str, float | str],
    variables: Mapping[str, str],
    secrets: Sequence[str],
    unset: Sequence[str],
) -> EdgeSettings:
    """Return settings without those that are `unset`, and with others. A variable is either a
    secret or not."""
    gone = {*unset}
    kept = {name: each for name, each in row.variables.items() if name not in gone}
    known = {name: each for name, each in row.options.items() if name not in gone}
    fresh = {**kept, **variables}
    named = [name for name in row.secrets if name not in gone and name not in variables]
    return replace(
        row,
        options={**known, **options},
        variables={name: value for name, value in fresh.items() if name not in secrets},
        secrets=tuple(sorted({*named, *secrets})),
    )
