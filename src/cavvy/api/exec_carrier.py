"""The server's end of a tunnel to a node of a job."""

import asyncio
from collections.abc import Callable

from cavvy.api.execs import JobExec, JobExecs
from cavvy.api.peers import PeerServers

_LOOK_S = 20.0  # maximum wait for the node's output before the session is marked as used
_ANNOUNCE_S = 2.0  # time between two announcements to other servers
_END_S = 2.0  # time that a node has to end a session that was closed


class ExecCarrier:
    """The server's end of a tunnel to a node, whose agent posts and polls the tunnel's data.
    Implements `TunnelCarrier` for a session of `JobExecs`. Create instances in the event loop only.
    """

    def __init__(
        self,
        execs: JobExecs,
        session: JobExec,
        peers: PeerServers | None = None,
        *,
        heard: Callable[[bytes], None],
        over: Callable[[str], None],
    ) -> None:
        self._execs, self._session, self._peers = execs, session, peers
        self._heard, self._over = heard, over
        self._out = bytearray()
        self._closed = False
        self._task = asyncio.create_task(self._follow())

    def put(self, data: bytes) -> None:
        self._out += data
        self._flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._flush()
            asyncio.get_running_loop().call_later(_END_S, self._give_up)

    def _give_up(self) -> None:
        """End the session of a node that does not answer, and remove the session's data."""
        session = self._session
        if session.exit_code is None:
            self._execs.put(session.id, session.gang, session.rank, 0, b"", 255)

    def _flush(self) -> None:
        """Send as much data as the session accepts, and send the remaining data after the agent has
        read some data."""
        session = self._session
        if session.input_ended or not (self._out or self._closed):
            return
        end = session.input_start + len(session.input)
        took = self._execs.put_input(session, end, bytes(self._out), self._closed) - end
        del self._out[:took]

    async def _follow(self) -> None:
        session = self._session
        with self._execs.watch.listen([session.id, session.job_id]) as listener:
            while True:
                data = bytes(session.data)
                self._execs.taken(session, session.start + len(data))
                self._flush()
                if data:
                    self._heard(data)
                    continue
                self._execs.end_lost(session)
                if session.exit_code is not None or self._execs.watch.closed:
                    self._over(session.problem or "the node closed the connection")
                    return
                await listener.wait(self._announce())

    def _announce(self) -> float:
        """Notify the other servers about the session until the node's agent has accepted it. The
        notification is repeated, because the agent can be connected to another server and signals
        can be lost. Returns the time to wait in seconds.
        """
        session, peers = self._session, self._peers
        if session.taken or peers is None or not peers.exist:
            return _LOOK_S
        peers.announce(session.id, session.gang, session.rank)
        return _ANNOUNCE_S
