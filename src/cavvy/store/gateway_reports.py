"""The counts of the gateways of all servers that share a PostgreSQL database. Each server has its
own gateway, and the server that reconciles a service needs the traffic of all gateways.
"""

from collections.abc import Sequence

from cavvy.domain.values import Struct
from cavvy.store.drivers import DatabaseSession, make_driver
from cavvy.store.workers import StoreWorkers

_KEPT_US = 86_400_000_000  # how long rows of vanished servers are kept
_NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"
_WRITE = (
    "INSERT INTO gateway_reports (service, server, document, written_at) SELECT service, ?, "
    f"document, {_NOW} FROM unnest(CAST(? AS TEXT[]), CAST(? AS TEXT[])) AS n (service, document) "
    "ORDER BY 1 ON CONFLICT (service, server) DO UPDATE SET document = EXCLUDED.document, "
    "written_at = EXCLUDED.written_at"
)
_READ = "SELECT server, document FROM gateway_reports WHERE service = ?"


class GatewayReport(Struct, frozen=True, kw_only=True):
    """One gateway's report on a service. `service` is the service's ID, and `document` is the
    encoded report, which this module does not decode.
    """

    service: str
    document: str
    server: str = ""


class GatewayReports:
    """Writes this server's reports and reads the reports of all servers, on its own connection."""

    def __init__(self, url: str, server: str) -> None:
        self._server = server
        self._workers = StoreWorkers(make_driver(url, journal="auto"), count=1, group=1)
        self._tidied = False

    async def put(self, reports: Sequence[GatewayReport]) -> None:
        """Replace this server's reports on these services. Raises StoreError."""
        await self._workers.do(lambda session: self._put(session, reports))

    async def list(self, service: str) -> Sequence[GatewayReport]:
        """Return the newest report of each server, including this server and servers that no longer
        exist. Raises StoreError.
        """
        rows = await self._workers.do(lambda session: session.run(_READ, (service,)).fetchall())
        return [
            GatewayReport(service=service, server=server, document=document)
            for server, document in rows
        ]

    async def delete(self, service: str) -> None:
        """Delete all reports on a service that no longer exists, whichever servers wrote the
        reports. Raises StoreError.
        """
        sql = "DELETE FROM gateway_reports WHERE service = ?"
        await self._workers.do(lambda session: session.run(sql, (service,)).rowcount)

    def close(self) -> None:
        """End the connection. Blocks."""
        self._workers.close()

    def _put(self, session: DatabaseSession, reports: Sequence[GatewayReport]) -> None:
        if not self._tidied:
            session.run(f"DELETE FROM gateway_reports WHERE written_at < {_NOW} - {_KEPT_US}")
            self._tidied = True
        names, documents = [each.service for each in reports], [each.document for each in reports]
        session.run(_WRITE, (self._server, names, documents))
