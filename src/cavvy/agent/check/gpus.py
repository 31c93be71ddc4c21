"""Checks through the driver's libraries that each GPU has its model's full memory, stores data
correctly, and reaches the required memory speed.

The check allocates blocks that fill nearly all of the free memory. The check writes random bytes to
the first block and copies the bytes from block to block. Each block is a copy of the block before
it, so an error in any block also appears in the last block. A second pass writes and copies the
same bytes with all bits inverted. The check measures the duration of each copy with GPU events, and
computes the memory's speed from the durations. Each copied byte counts twice: as a read and as a
write.
"""

from __future__ import annotations

import ctypes
import os

from ..documents import CheckConfig

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
    """Return one line for each GPU. If a GPU fails the check, GpuFault is raised with the measured
    values, and the remaining GPUs are not checked.
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
