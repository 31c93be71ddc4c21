"""Whether each GPU is all there, keeps what is written to it and is as fast as its kind, by the
driver's own libraries.

A row of blocks is laid over nearly all of the free memory. Random bytes go into the first and are
copied from block to block, then their complement: what arrives in the last has been through every
block, and the copies' own time is the memory's speed. The time is the GPU's (events), the memory's
traffic twice what is copied: it is read and written.
"""

from __future__ import annotations

import ctypes
import os

from ..config import CheckConfig

BLOCK = 256 << 20
PIECE = 4 << 20  # of random bytes, repeated within a block
SPARED = 512 << 20  # of free memory, for the driver and a display
LEAST_BLOCKS = 4
LEAST_TOTAL = 0.9  # of the kind's memory; error correction and the driver keep a part
LEAST_FREE = 0.8  # of what the GPU has
COMPLEMENT = bytes(255 - value for value in range(256))
UNCORRECTED, SINCE_BOOT = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t


class GpuFault(Exception):
    """A GPU, or its driver, is not as it should be; the message has the figures."""


class CudaDriver:
    """The calls of libcuda that are needed. Raises GpuFault for every answer but success."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GpuFault(f"the driver's library cannot be loaded: {error}") from error
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
    """One GPU with its context, by its place among those that the work sees."""

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
        """As NVML writes it."""
        raw = (ctypes.c_ubyte * 16)()
        self._cuda.call("cuDeviceGetUuid", raw, self._device)
        text = bytes(raw).hex()
        return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, blocks: int) -> list[ctypes.c_ulonglong]:
        """As many blocks of BLOCK bytes as there are, at most so many."""
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
        """Send the bytes through all blocks; bytes a second. Raises GpuFault where others
        arrive.
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
                what = f"{wrong} bits of the first {PIECE >> 20} MiB that differ arrived wrong"
                raise GpuFault(f"its memory does not keep what is written: {what}")


def check_gpus(wanted: CheckConfig, count: int) -> list[str]:
    """One line for each GPU. Raises GpuFault at the first that falls short, with what was
    measured.
    """
    cuda = CudaDriver()
    found = cuda.count()
    if found < count:
        raise GpuFault(f"{found} of {count} GPUs are there")
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
            raise GpuFault(f"{total >> 20} MiB of memory, at least {least} are a {wanted.kind}'s")
        if free < total * LEAST_FREE:
            raise GpuFault(f"{free >> 20} of {total >> 20} MiB are free: something else uses it")
        errors = count_errors(nvml, gpu.uuid())
        blocks = gpu.allocate(max(LEAST_BLOCKS, (free - SPARED) // BLOCK))
        speed = (
            max(gpu.run_through(blocks, each) for each in (piece, piece.translate(COMPLEMENT)))
            / 1e9
        )
        gpu.free(blocks)
        gpu.close()
        told += [
            f"{len(blocks) * BLOCK >> 20} of {total >> 20} MiB written and read, {errors}",
            f"{speed:.0f} GB/s",
        ]
        if wanted.bandwidth_gbs:
            told[-1] += f" of a {wanted.kind}'s {wanted.bandwidth_gbs:.0f}"
            if speed < wanted.share * wanted.bandwidth_gbs:
                least = int(wanted.share * wanted.bandwidth_gbs)
                raise GpuFault(
                    f"its memory moves {speed:.0f} GB/s, at least {least} are wanted of a "
                    f"{wanted.kind}"
                )
    except GpuFault as error:
        raise GpuFault(f"GPU {index}: {error}") from error
    return ", ".join(told)


def open_nvml() -> ctypes.CDLL | None:
    """NVML, which alone knows the errors that were counted; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def count_errors(nvml: ctypes.CDLL | None, uuid: str) -> str:
    """What NVML says of the GPU's memory errors. Raises GpuFault where it is bad."""
    handle = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return "its counters cannot be read"
    errors = ctypes.c_ulonglong()
    counted = not nvml.nvmlDeviceGetTotalEccErrors(
        handle, ctypes.c_int(UNCORRECTED), ctypes.c_int(SINCE_BOOT), ctypes.byref(errors)
    )
    if counted and errors.value:
        raise GpuFault(f"{errors.value} uncorrected memory errors since the node's boot")
    rows = [
        ctypes.c_uint() for _ in range(4)
    ]  # remapped for corrected and uncorrected errors, pending, failed
    if hasattr(nvml, "nvmlDeviceGetRemappedRows") and not nvml.nvmlDeviceGetRemappedRows(
        handle, *(ctypes.byref(each) for each in rows)
    ):
        if rows[3].value:
            raise GpuFault("its memory could not be repaired: remapping a row has failed")
        if rows[2].value:
            raise GpuFault("its memory waits for a reset to be repaired: rows are to be remapped")
    return "no memory errors" if counted else "it does not count memory errors"
