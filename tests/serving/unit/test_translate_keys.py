"""A key that cannot be used is told at once; a database may answer again by itself."""

from cavvy.api.errors import RetryLater, explain
from cavvy.client.errors import ApiError
from cavvy.store.base import KeyUnusable, StoreUnusable


def test_a_client_does_not_wait_for_a_key_that_is_missing() -> None:
    told = explain(KeyUnusable("cannot read the key /k"))
    assert told is not None
    assert (told.code, str(told), isinstance(told, RetryLater)) == (
        "key-unusable",
        "cannot read the key /k",
        False,
    )
    assert not ApiError(told.code, "", status=503).passing
    database = explain(StoreUnusable("away"))
    assert database is not None
    assert ApiError(database.code, "", status=503).passing
