"""Closer looks: what reading a sample consists of, which line is at work, and when no operation runs."""

import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager
from time import perf_counter, thread_time
from typing import Any

import torch
from torch.utils.data import default_collate

EVERY_S = 0.004
SHOWN = 3


def look_at_data(data: Any, count: int) -> dict[str, Any]:
    """Seconds a sample, of the clock and of the processor, for reading it, transforming it, and joining a batch."""
    count = min(count, len(data.source))
    if data.is_in_memory:
        return {"read": [0.0, 0.0], "transform": [0.0, 0.0], "collate": [0.0, 0.0]}
    places = data.indices(range(data.position, data.position + count)).tolist()
    reading, transforming, samples = [0.0, 0.0], [0.0, 0.0], []
    for position, place in enumerate(places, data.position):
        sample = _timed(reading, lambda place=place: data.source[place])
        if data.transform is not None:
            sample = _timed(transforming, lambda sample=sample, position=position: data._apply(sample, position))
        samples.append(sample)
    joining = [0.0, 0.0]
    _timed(joining, lambda: default_collate(samples))
    told = {"read": reading, "transform": transforming, "collate": joining}
    return {name: [value / count for value in pair] for name, pair in told.items()}


def _timed(into: list[float], work: Any) -> Any:
    begun, cpu = perf_counter(), thread_time()
    made = work()
    into[0] += perf_counter() - begun
    into[1] += thread_time() - cpu
    return made


class Sampler:
    """Looks every few milliseconds which line of the user's own the main thread is at, outside of all libraries."""

    def __init__(self) -> None:
        self._lines: Counter[str] = Counter()
        self._looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> list[tuple[str, float]]:
        """The lines that were seen most, as shares of all looks."""
        self._stop.set()
        self._thread.join()
        return [(line, seen / max(self._looks, 1)) for line, seen in self._lines.most_common(SHOWN)]

    def _watch(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._stop.wait(EVERY_S):
            self._looks += 1
            frame = sys._current_frames().get(main)
            if frame is not None and _is_users(frame.f_code.co_filename):
                self._lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1


def _is_users(name: str) -> bool:
    library = ("site-packages", "/remuda/train/", "/remuda/tuning/", "<frozen", "/lib/python", "<string>")
    return not any(part in name for part in library)


class traced(AbstractContextManager["traced"]):
    """A trace for Perfetto or TensorBoard, and the seconds in which this process ran no operation of PyTorch."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.idle = 0.0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)

    def __enter__(self) -> "traced":
        self._profile.start()
        self._began = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = perf_counter() - self._began
        self._profile.stop()
        events: Any = self._profile.events()  # type: ignore[no-untyped-call]  # torch's
        spans = sorted((e.time_range.start, e.time_range.end) for e in events if _is_work(e))
        busy = until = 0.0
        for start, end in spans:
            busy += max(end - max(start, until), 0.0)
            until = max(until, end)
        self.idle = max(seconds - busy * 1e-6, 0.0)
        if self._path != "-":
            self._profile.export_chrome_trace(self._path)


def _is_work(event: Any) -> bool:
    name = str(event.name)
    return name.startswith(("aten::", "gloo:", "nccl:", "autograd::")) and "wait" not in name
