"""The keys of a service: how many there may be, how one is revoked, and when each was last used."""

from datetime import UTC, datetime, timedelta

import pytest

from cavvy.capabilities.serving.stored_services import (
    MOST_KEYS,
    KeyUnknown,
    ServiceKey,
    StoredService,
    TooManyKeys,
    note_uses,
    with_key,
    without_key,
)
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ServiceKey(id="k1", sha256="1" * 64, created_at=NOW)
TASK = TaskSpec(name="chat", run="serve", service=ServiceSpec(port=80))
OTHER = ServiceKey(id="k2", sha256="2" * 64, created_at=NOW)


def make(*keys: ServiceKey) -> StoredService:
    return StoredService(project="p", name="chat", id="s", task=TASK, created_at=NOW, keys=keys)


def test_a_service_has_a_maximum_of_keys() -> None:
    service = make(*(replace(KEY, id=f"k{number}") for number in range(MOST_KEYS - 1)))
    full = with_key(service, replace(KEY, id="last"))
    assert (len(full.keys), full.keys[-1].id) == (1000, "last")
    with pytest.raises(TooManyKeys, match="service chat has 1000 keys, the maximum"):
        with_key(full, OTHER)


def test_a_revoked_key_is_gone_and_the_others_stay() -> None:
    assert without_key(make(KEY, OTHER), "k1") == make(OTHER)
    with pytest.raises(KeyUnknown, match="service chat has no key k3"):
        without_key(make(KEY, OTHER), "k3")


def test_the_last_use_of_a_key_never_moves_back() -> None:
    """Several gateways report the uses, so a report may be late."""
    used = note_uses(make(KEY, OTHER), {"k1": NOW.timestamp() + 60})
    later = NOW + timedelta(seconds=60)
    assert used.keys == (replace(KEY, used_at=later), OTHER)
    assert note_uses(used, {"k1": NOW.timestamp() + 30, "k2": NOW.timestamp()}).keys == (
        replace(KEY, used_at=later),
        replace(OTHER, used_at=NOW),
    )
    assert note_uses(used, {"k1": NOW.timestamp() + 90}).keys[0].used_at == NOW + timedelta(
        seconds=90
    )
    assert note_uses(used, {}) == used
