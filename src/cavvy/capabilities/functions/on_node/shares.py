"""Divides the time of a job among its calls. Only the standard library is imported."""


class SharedTime:
    """At each moment, the calls that run have equal parts of the time; without any, it is idle. So
    the shares of all calls and the idle time are together the time since the begin.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._running = 0
        self._each_s = 0.0  # what a call would have that runs since the begin
        self.shared_s = self.idle_s = 0.0

    def begin(self, now: float) -> float:
        """Count a call that begins, and return what `end` needs."""
        self.go(now)
        self._running += 1
        return self._each_s

    def end(self, now: float, began: float) -> float:
        """Count a call that ends, and return its share in seconds."""
        self.go(now)
        self._running -= 1
        return self._each_s - began

    def go(self, now: float) -> None:
        """Divide the time until now."""
        passed_s, self._at = max(now - self._at, 0.0), now
        if self._running:
            self._each_s += passed_s / self._running
            self.shared_s += passed_s
        else:
            self.idle_s += passed_s
