"""Detects signs of a broken GPU in the task's output and in the kernel's log. If a task fails and
its node shows a sign of a broken GPU, the failure is not counted as the task's fault.
"""

from __future__ import annotations

import os
import re

# Messages of CUDA, NVML and nvidia-smi about a faulty device. Illegal accesses and full memory are
# not listed, because the program causes them.
_SAID = (
    b"uncorrectable ECC error",
    b"GPU has fallen off the bus",
    b"GPU is lost",
    b"CUDA-capable device(s) is/are busy or unavailable",
)
# Xid errors caused by the hardware or driver, from NVIDIA's catalogue
# (docs.nvidia.com/deploy/xid-errors): double bit ECC, page retirement, NVLink, fallen off the bus,
# contained and uncontained ECC, GSP. The numbers 13, 31, 43, 45 and 68 are left out, because
# programs usually cause them.
HARDWARE_XIDS = frozenset((48, 64, 74, 79, 94, 95, 119, 120, 140))
_XID = re.compile(rb"NVRM: Xid \(([^)]*)\): (\d+)")
GPU, LINK, NETWORK = "gpu-fault", "slow-link", "network"
# kind of fault -> outcome, and the beginning of its reason
FAILURES = {GPU: "GPU fault: ", LINK: "slow link: ", NETWORK: ""}
_KEPT = 512  # bytes of output kept between calls, because a sign may continue in the next piece
_KERNEL_LOG = "/dev/kmsg"
_MOST_RECORDS = 20000


class GpuFaultScanner:
    """Finds the first sign of a broken GPU. Call `feed` with each piece of output."""

    def __init__(self) -> None:
        self.found = ""
        self._rest = b""

    def feed(self, data: bytes) -> None:
        if self.found:
            return
        text = self._rest + data
        self.found = find_sign(text)
        self._rest = text[-_KEPT:]


def find_sign(text: bytes) -> str:
    """Return the first sign of a broken GPU in this text, or "" if the text contains none."""
    for match in _XID.finditer(text):
        if int(match.group(2)) in HARDWARE_XIDS:
            return f"Xid {int(match.group(2))} of {match.group(1).decode('ascii', 'replace')}"
    for sign in _SAID:
        if sign in text:
            return sign.decode()
    return ""


def read_kernel(since_s: float, path: str = _KERNEL_LOG) -> str:
    """Return the first sign of a broken GPU in the kernel's log since `since_s` (monotonic
    seconds). Returns "" if the log contains no sign or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(handle, 8192)
            except BrokenPipeError:
                continue  # the kernel overwrote an entry before it was read: read the next entry
            except OSError:
                break
            if not record:
                break
            head, _, text = record.partition(b";")
            fields = head.split(b",")
            if len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 >= since_s:
                sign = find_sign(text)
                if sign:
                    return sign
        return ""
    finally:
        os.close(handle)
