"""Reaches the devices at the edge of a server under test, and their rows."""

from cavvy.api.app_state import AppState
from cavvy.capabilities.edge.rows import SqlEdge
from cavvy.capabilities.edge.service import EdgeService
from cavvy.store.sql import Store


def rows_of(store: Store) -> SqlEdge:
    return SqlEdge(*store.database)


def edge_of(app_state: AppState) -> EdgeService:
    found = app_state.control_plane.find(EdgeService)
    assert found is not None
    return found
