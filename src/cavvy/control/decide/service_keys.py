"""Adds and removes the keys of a service, and records when each key was last used."""

from collections.abc import Mapping
from datetime import UTC, datetime

from cavvy.domain.stored_services import ServiceKey, StoredService
from cavvy.domain.values import replace

MOST_KEYS = 1000


class TooManyKeys(Exception):
    """Raised if the service has the maximum number of keys; revoke another key first."""


class KeyUnknown(Exception):
    """Raised if the service has no key with this ID."""


def with_key(service: StoredService, key: ServiceKey) -> StoredService:
    """Return the service with one more key. Raises TooManyKeys."""
    if len(service.keys) >= MOST_KEYS:
        raise TooManyKeys(f"service {service.name} has {MOST_KEYS} keys, the maximum")
    return replace(service, keys=(*service.keys, key))


def without_key(service: StoredService, key_id: str) -> StoredService:
    """Return the service without the key `key_id`. Raises KeyUnknown."""
    kept = tuple(each for each in service.keys if each.id != key_id)
    if len(kept) == len(service.keys):
        raise KeyUnknown(f"service {service.name} has no key {key_id}")
    return replace(service, keys=kept)


def note_uses(service: StoredService, used: Mapping[str, float]) -> StoredService:
    """Record the times at which the gateway last saw the service's keys, and return the service."""
    if not used:
        return service
    return replace(service, keys=tuple(_note_use(each, used.get(each.id)) for each in service.keys))


def _note_use(key: ServiceKey, seen: float | None) -> ServiceKey:
    if seen is None:
        return key
    at = datetime.fromtimestamp(seen, UTC)
    return replace(key, used_at=at) if key.used_at is None or at > key.used_at else key
