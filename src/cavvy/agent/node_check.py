"""Runs the whole check of one rank's node in a separate process, because a faulty GPU driver can
hang forever. The check includes each GPU's memory, and the network speed between the nodes of a
gang.

For the network speed, the ranks form a ring. All ranks simultaneously send data to the next rank
for two seconds. Each rank uses several TCP streams, because one stream does not fill a fast link. A
peer must prove that it knows the gang's key; connections without this proof are dropped. The
receiving rank decides whether its link is fast enough.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import socket
import threading
import time
from contextlib import suppress

from .config import AgentConfig
from .documents import CheckConfig, WorkConfig
from .gpu_faults import GPU, LINK, read_kernel
from .work.environment import device_variables
from .work.reaper import report

LIMIT_S = 180.0  # seconds for the whole check
LATELY_S = 600.0  # age in seconds of the oldest kernel messages that are read
# the port is the master's port + this offset + the rank, because several ranks may run on one
# machine
PORT_AFTER_MASTER = 2
STREAMS = 4
SECONDS = 2.0
MEET_S = 60.0  # seconds that a rank waits for its neighbours
STALL_S = 10.0
CHUNK = 1 << 18
MARK = 32  # bytes of a nonce, and of the HMAC that proves knowledge of the key


def check_node(config: AgentConfig, work: WorkConfig, channel: int) -> int:
    """Write each measurement to `channel` as a line `check TEXT`, then the result as JSON. The
    task's own variables are left out, because they could make the driver load any library.
    """
    os.environ.update(device_variables(config))  # the indices of the GPUs assigned to the work
    outcome = reason = ""
    try:
        # Check the links first. If the GPU check failed first, the other ranks would wait for this
        # one in vain.
        if work.nodes > 1:
            _tell(channel, check_links(_wanted(work), work, config.rank))
        _check_gpus(config, work, channel)
    except GpuFault as error:
        outcome, reason = GPU, str(error)
    except SlowLink as error:
        outcome, reason = LINK, str(error)
    except OSError as error:
        outcome, reason = "node", f"the node check failed to run: {error}"
    return report(channel, outcome, reason)


def _check_gpus(config: AgentConfig, work: WorkConfig, channel: int) -> None:
    if not work.accelerators_per_node:
        return
    if config.vendor not in ("", "nvidia"):
        _tell(channel, f"only NVIDIA GPUs can be checked, not {config.vendor} GPUs")
        return
    fault = read_kernel(time.monotonic() - LATELY_S)
    if fault:
        raise GpuFault(f"the kernel log reports {fault}")
    for line in check_gpus(_wanted(work), work.accelerators_per_node):
        _tell(channel, line)


def _wanted(work: WorkConfig) -> CheckConfig:
    assert work.check is not None
    return work.check


def _tell(channel: int, text: str) -> None:
    os.write(channel, f"check {text}\n".encode())


class SlowLink(Exception):
    """Raised if a link is missing or slower than required. The message contains the measured
    speeds."""


def check_links(wanted: CheckConfig, work: WorkConfig, rank: int) -> str:
    """Measure the links to the two neighbours in the ring. Returns the measured speeds as text.
    Raises SlowLink if a link is missing or too slow."""
    before, after = (rank - 1) % work.nodes, (rank + 1) % work.nodes
    end = time.monotonic() + MEET_S
    key = work.gang_key.encode()
    failures: list[str] = []
    with socket.socket(_family(work.addresses[rank])) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", _port(work, rank)))
        server.listen(4 * STREAMS)
        sender = threading.Thread(
            target=_send_all, args=(work, after, key, end, failures), daemon=True
        )
        sender.start()
        received, seconds = _receive_all(server, key, before, end)
        sender.join(max(0.0, end - time.monotonic()) + SECONDS + STALL_S)
    if failures:
        raise SlowLink(failures[0])
    mbps = received * 8 / 1e6 / seconds
    told = f"{say_speed(mbps)} from rank {before} ({work.addresses[before]})"
    if mbps < wanted.link_mbps:
        raise SlowLink(f"{told}, required: at least {say_speed(wanted.link_mbps)}")
    return told


def say_speed(mbps: float) -> str:
    return f"{mbps / 1000:.1f} Gbit/s" if mbps >= 1000 else f"{mbps:.0f} Mbit/s"


def _port(work: WorkConfig, rank: int) -> int:
    return work.master_port + PORT_AFTER_MASTER + rank


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _show(key: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, b"check" + nonce, hashlib.sha256).digest()


def _send_all(work: WorkConfig, rank: int, key: bytes, end: float, failures: list[str]) -> None:
    where = (work.addresses[rank], _port(work, rank))
    lines = []
    try:
        for _ in range(STREAMS):
            lines.append(_call(where, key, end))
    except (OSError, ValueError) as error:
        failures.append(f"cannot reach rank {rank} at {where[0]}:{where[1]}: {error}")
    senders = [threading.Thread(target=_send, args=(line,), daemon=True) for line in lines]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


def _call(where: tuple[str, int], key: bytes, end: float) -> socket.socket:
    """Connect to a rank and verify that it knows the gang's key. Raises OSError, ValueError."""
    while True:
        try:
            line = socket.create_connection(where, max(0.1, min(5.0, end - time.monotonic())))
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    line.settimeout(max(0.1, end - time.monotonic()))
    line.sendall(_show(key, _read(line)))
    if _read(line) != _show(key, b"rank"):
        raise ValueError("the peer at this address is not a rank of this gang")
    line.settimeout(STALL_S)
    return line


def _send(line: socket.socket) -> None:
    data = bytes(CHUNK)
    until = time.monotonic() + SECONDS
    with line, suppress(OSError):  # the receiver reports a broken connection
        while time.monotonic() < until:
            line.sendall(data)


def _receive_all(server: socket.socket, key: bytes, rank: int, end: float) -> tuple[int, float]:
    """Return the number of bytes received over all connections, and the duration of the transfer in
    seconds. Raises SlowLink."""
    lines: list[socket.socket] = []
    while len(lines) < STREAMS:
        server.settimeout(max(0.01, end - time.monotonic()))
        try:
            line, _ = server.accept()
        except OSError:
            raise SlowLink(f"rank {rank} did not connect within {MEET_S:.0f} s") from None
        with suppress(OSError, ValueError):
            if _greet(line, key):
                lines.append(line)
                continue
        line.close()
    counts = [0] * STREAMS
    began = time.monotonic()
    readers = [
        threading.Thread(target=_count, args=(line, counts, at), daemon=True)
        for at, line in enumerate(lines)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(counts), max(0.001, time.monotonic() - began)


def _greet(line: socket.socket, key: bytes) -> bool:
    line.settimeout(STALL_S)
    nonce = os.urandom(MARK)
    line.sendall(nonce)
    if not hmac.compare_digest(_read(line), _show(key, nonce)):
        return False
    line.sendall(_show(key, b"rank"))
    return True


def _read(line: socket.socket) -> bytes:
    found = b""
    while len(found) < MARK:
        more = line.recv(MARK - len(found))
        if not more:
            raise ValueError("the connection was closed")
        found += more
    return found


def _count(line: socket.socket, counts: list[int], at: int) -> None:
    buffer = bytearray(CHUNK)
    with line, suppress(OSError):
        while True:
            size = line.recv_into(buffer)
            if not size:
                return
            counts[at] += size


BLOCK = 256 << 20
PIECE = 4 << 20  # bytes of random data; repeated to fill a block
SPARED = 512 << 20  # bytes of free memory left for the driver and a display
LEAST_BLOCKS = 4
# minimum share of the model's nominal memory that a GPU must report; drivers and ECC use the rest
LEAST_TOTAL = 0.9
LEAST_FREE = 0.8  # minimum share of the total memory that must be free
COMPLEMENT = bytes(255 - value for value in range(256))
UNCORRECTED, SINCE_BOOT = 1, 0  # values of nvmlMemoryErrorType_t and nvmlEccCounterType_t


class GpuFault(Exception):
    """Raised if a GPU or its driver is faulty. The message contains the measurements of the
    check."""


class CudaDriver:
    """The functions of libcuda that the check calls. A call that fails raises GpuFault."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GpuFault(f"the driver library cannot be loaded: {error}") from error
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(said))
            raise GpuFault(
                f"{name}: {(said.value or b'error').decode('ascii', 'replace')} ({code})"
            )

    def count(self) -> int:
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value


class CheckedGpu:
    """One GPU and its CUDA context. `index` is the GPU's number among the GPUs that the work can
    see.
    """

    def __init__(self, cuda: CudaDriver, index: int) -> None:
        self._cuda = cuda
        self._device = ctypes.c_int()
        cuda.call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(index))
        context = ctypes.c_void_p()
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        cuda.call("cuCtxSetCurrent", context)

    def close(self) -> None:
        self._cuda.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._cuda.call("cuDeviceGetName", text, ctypes.c_int(256), self._device)
        return text.value.decode("utf-8", "replace")

    def uuid(self) -> str:
        """Return the GPU's UUID in the form that NVML uses: "GPU-" and hexadecimal digits."""
        raw = (ctypes.c_ubyte * 16)()
        self._cuda.call("cuDeviceGetUuid", raw, self._device)
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def memory(self) -> tuple[int, int]:
        """Return the GPU's free and total memory in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, blocks: int) -> list[ctypes.c_ulonglong]:
        """Allocate up to `blocks` blocks of BLOCK bytes, or fewer if the memory is full. Raises
        GpuFault if fewer than LEAST_BLOCKS blocks fit.
        """
        found: list[ctypes.c_ulonglong] = []
        for _ in range(blocks):
            block = ctypes.c_ulonglong()
            try:
                self._cuda.call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(BLOCK))
            except GpuFault:
                if len(found) < LEAST_BLOCKS:
                    raise
                break
            found.append(block)
        return found

    def free(self, blocks: list[ctypes.c_ulonglong]) -> None:
        for block in blocks:
            self._cuda.call("cuMemFree_v2", block)

    def run_through(self, blocks: list[ctypes.c_ulonglong], piece: bytes) -> float:
        """Copy `piece` through all blocks, and return the memory's speed in bytes per second.
        Raises GpuFault if the last block does not contain `piece`.
        """
        size = ctypes.c_size_t(PIECE)
        for offset in range(0, BLOCK, PIECE):
            self._cuda.call(
                "cuMemcpyHtoD_v2", ctypes.c_ulonglong(blocks[0].value + offset), piece, size
            )
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (begin, end):
            self._cuda.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self._cuda.call("cuEventRecord", begin, None)
        for at in range(1, len(blocks)):
            self._cuda.call("cuMemcpyDtoD_v2", blocks[at], blocks[at - 1], ctypes.c_size_t(BLOCK))
        self._cuda.call("cuEventRecord", end, None)
        self._cuda.call("cuEventSynchronize", end)
        took_ms = ctypes.c_float()
        self._cuda.call("cuEventElapsedTime", ctypes.byref(took_ms), begin, end)
        for event in (begin, end):
            self._cuda.call("cuEventDestroy_v2", event)
        self._compare(blocks[-1], piece)
        return 2 * BLOCK * (len(blocks) - 1) / max(1e-6, took_ms.value / 1000)

    def _compare(self, block: ctypes.c_ulonglong, piece: bytes) -> None:
        arrived = ctypes.create_string_buffer(PIECE)
        for offset in range(0, BLOCK, PIECE):
            where = ctypes.c_ulonglong(block.value + offset)
            self._cuda.call("cuMemcpyDtoH_v2", arrived, where, ctypes.c_size_t(PIECE))
            if arrived.raw != piece:
                wrong = bin(
                    int.from_bytes(arrived.raw, "big") ^ int.from_bytes(piece, "big")
                ).count("1")
                what = f"{wrong} wrong bits in the first damaged block of {PIECE >> 20} MiB"
                raise GpuFault(f"GPU memory does not keep written data: {what}")


def check_gpus(wanted: CheckConfig, count: int) -> list[str]:
    """Check through the driver's libraries that each GPU has its model's full memory, stores data
    correctly, and reaches the required memory speed. Return one line for each GPU. If a GPU fails
    the check, GpuFault is raised with the measured values, and the remaining GPUs are not checked.

    The check allocates blocks that fill nearly all of the free memory. The check writes random
    bytes to the first block and copies the bytes from block to block. Each block is a copy of the
    block before it, so an error in any block also appears in the last block. A second pass writes
    and copies the same bytes with all bits inverted. The check measures the duration of each copy
    with GPU events, and computes the memory's speed from the durations. Each copied byte counts
    twice: as a read and as a write.
    """
    cuda = CudaDriver()
    found = cuda.count()
    if found < count:
        raise GpuFault(f"found {found} of {count} GPUs")
    piece = os.urandom(PIECE)
    nvml = open_nvml()
    return [_check(cuda, nvml, index, wanted, piece) for index in range(found)]


def _check(
    cuda: CudaDriver, nvml: ctypes.CDLL | None, index: int, wanted: CheckConfig, piece: bytes
) -> str:
    try:
        gpu = CheckedGpu(cuda, index)
        told = [f"GPU {index}", gpu.name()]
        free, total = gpu.memory()
        least = int(wanted.memory_mib * LEAST_TOTAL)
        if total >> 20 < least:
            raise GpuFault(
                f"the GPU has {total >> 20} MiB of memory; a {wanted.kind} has at least {least}"
            )
        if free < total * LEAST_FREE:
            raise GpuFault(
                f"only {free >> 20} of {total >> 20} MiB of GPU memory are free; other programs "
                "use the rest"
            )
        errors = count_errors(nvml, gpu.uuid())
        blocks = gpu.allocate(max(LEAST_BLOCKS, (free - SPARED) // BLOCK))
        speed = (
            max(gpu.run_through(blocks, each) for each in (piece, piece.translate(COMPLEMENT)))
            / 1e9
        )
        gpu.free(blocks)
        gpu.close()
        told += [
            f"{len(blocks) * BLOCK >> 20} of {total >> 20} MiB of memory tested, {errors}",
            f"{speed:.0f} GB/s",
        ]
        if wanted.bandwidth_gbs:
            told[-1] += f" of a {wanted.kind}'s {wanted.bandwidth_gbs:.0f}"
            if speed < wanted.share * wanted.bandwidth_gbs:
                least = int(wanted.share * wanted.bandwidth_gbs)
                raise GpuFault(
                    f"the memory speed is {speed:.0f} GB/s; a {wanted.kind} must reach {least}"
                )
    except GpuFault as error:
        raise GpuFault(f"GPU {index}: {error}") from error
    return ", ".join(told)


def open_nvml() -> ctypes.CDLL | None:
    """Load NVML, the only source of the GPU's error counters; return None if it is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def count_errors(nvml: ctypes.CDLL | None, uuid: str) -> str:
    """Return NVML's report on the GPU's memory errors. Raises GpuFault if there are
    uncorrected errors, or if a remapping of memory rows is pending or has failed."""
    handle = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return "the error counters cannot be read"
    errors = ctypes.c_ulonglong()
    counted = not nvml.nvmlDeviceGetTotalEccErrors(
        handle, ctypes.c_int(UNCORRECTED), ctypes.c_int(SINCE_BOOT), ctypes.byref(errors)
    )
    if counted and errors.value:
        raise GpuFault(f"{errors.value} uncorrected memory errors since the node booted")
    # rows remapped after corrected and after uncorrected errors, pending remappings, and failed
    # remappings
    rows = [ctypes.c_uint() for _ in range(4)]
    if hasattr(nvml, "nvmlDeviceGetRemappedRows") and not nvml.nvmlDeviceGetRemappedRows(
        handle, *(ctypes.byref(each) for each in rows)
    ):
        if rows[3].value:
            raise GpuFault("the GPU could not repair its memory: remapping a row failed")
        if rows[2].value:
            raise GpuFault("the GPU must be reset, because it has to remap rows of its memory")
    return "no memory errors" if counted else "this GPU does not count memory errors"
