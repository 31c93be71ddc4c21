"""Times about sixty kernels with about 430 shapes on this machine's accelerator in less than two
minutes, and prints each result as a line of JSON. `cavvy bench --kernels` runs this file
in its own process, here or in a job, so it needs only PyTorch and imports nothing of Cavvy.

    python bench_kernels.py [--seconds 110] [--smoke]

A row has fields of `cavvy.planner.estimate.profile.KernelProfile`, and `us`, the median number of
microseconds that one call takes on the device. The time that the host takes to launch a kernel is
measured separately: the device's queue is filled before the clock starts. Operands of more than
4 MiB are rotated, so that they are not in the device's cache.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, prod
from time import perf_counter, strftime
from typing import Any

import torch
import torch.nn.functional as F

FORMAT = "cavvy-device-profile/1"
MARK = "CAVVY_KERNEL "  # begins each printed line
TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
Call = Callable[[], Any]
Run = Callable[[], tuple[Call, Sequence[torch.Tensor]]]  # a call, and what gets gradients
_aten = torch.ops.aten

_WARM_S = 0.5  # the clock of an idle device rises in this time
_GROUP_S = 2e-3  # the length of one measurement
_GROUPS, _CALLS = 7, 40  # measurements of a kernel, and the most calls in a measurement
_CACHED = 4 << 20  # operands up to this number of bytes are not rotated
_CYCLES = 2e9  # cycles per second that a waiting kernel counts, at most


@dataclass(frozen=True)
class Case:
    """One kernel with its shape. `make` makes operands and returns the call."""

    kind: str
    name: str
    precision: str
    make: Callable[[], Call]
    size: tuple[int, ...] = (0, 0, 0, 0)
    shape: tuple[int, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0
    backward: bool = False
    layout: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "precision": self.precision,
            "wide": self.precision in ("fp32", "tf32"),
            "backward": self.backward,
            "size": self.size,
            "shape": self.shape,
            "flops": self.flops,
            "bytes": self.bytes,
            "layout": self.layout,
            **self.more,
        }


class Device:
    """The accelerator: its clock, and how to make tensors on it."""

    def __init__(self, kind: str, small: bool) -> None:
        self.kind, self.small = kind, small
        self.cache = 64 << 20
        if kind == "cuda":
            self.cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", self.cache)

    def random(self, *shape: int, precision: str = "bf16", grad: bool = False) -> torch.Tensor:
        made = torch.randn(*shape, device=self.kind, dtype=TYPES[precision])
        return made.requires_grad_(grad)

    def number(self, size: int, least: int = 1, by: int = 64) -> int:
        """A dimension, which is smaller if the run is only a trial."""
        return max(least, size // by) if self.small and size > least else size

    def wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()
        elif self.kind == "mps":
            torch.mps.synchronize()

    def time(self, calls: Sequence[Call]) -> tuple[float, float, int]:
        """Return the median seconds of a call, the spread as a share of it, and the number of
        calls in a measurement.
        """
        for call in calls:
            call()
        self.wait()
        begin = perf_counter()
        calls[0]()
        launched = perf_counter() - begin
        self.wait()
        whole = max(perf_counter() - begin, 1e-6)
        if self.small:
            return whole, 0.0, 1
        number = max(2, min(_CALLS, ceil(_GROUP_S / whole)))
        groups = _GROUPS if whole < 0.05 else 3
        if self.kind == "cuda":
            times = [self._group(calls, number, launched * number) for _ in range(groups)]
        else:
            times = [self._clock(calls, number * 4) for _ in range(groups)]
        times.sort()
        median = statistics.median(times)
        return median, (times[-2] - times[0]) / median, number

    def _group(self, calls: Sequence[Call], number: int, launch_s: float) -> float:
        start, end = (_mark() for _ in range(2))
        cycles = int((launch_s * 1.5 + 1e-4) * _CYCLES)  # until all calls are queued
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # of torch
        start.record()
        for index in range(number):
            calls[index % len(calls)]()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / number

    def _clock(self, calls: Sequence[Call], number: int) -> float:
        begin = perf_counter()
        for index in range(number):
            calls[index % len(calls)]()
        self.wait()
        return (perf_counter() - begin) / number


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of torch


def measure(case: Case, device: Device) -> dict[str, Any]:
    """Time one kernel. A kernel that does not run has an `error` in place of `us`."""
    row = case.row()
    wide = case.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wide
    try:
        sets = 1
        if case.bytes > _CACHED and not device.small:
            sets = min(8, max(1, ceil(2 * device.cache / case.bytes)))
        seconds, spread, number = device.time([case.make() for _ in range(sets)])
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {**row, "error": "out of memory"}
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return {**row, "error": str(error).splitlines()[0][:200]}
    return {**row, "us": round(seconds * 1e6, 3), "spread": round(spread, 3), "calls": number}


def list_cases(device: Device) -> Iterator[Case]:
    """All kernels, in turns of the groups, so that a run that is cut short has some of each."""
    groups = [
        list(make(device))
        for make in (
            _matmuls,
            _convolutions,
            _attentions,
            _recurrent,
            _norms,
            _pointwise,
            _copies,
            _indexes,
            _optimizers,
        )
    ]
    total = max(map(len, groups))
    for index in range(total):
        for group in groups:
            low, high = (each * len(group) // total for each in (index, index + 1))
            yield from group[low:high]


def _read(text: str) -> list[list[Any]]:
    """The shapes in a text, such as 64x64x56."""
    return [
        [int(each) if each.isdigit() else each for each in word.split("x")] for word in text.split()
    ]


def _both(case: Case, run: Run, *, moved: float, flops: float = 0.0) -> Iterator[Case]:
    """The forward pass of an operation that `case` describes, and its backward pass, which moves
    `moved` bytes.
    """

    def backward() -> Call:
        call, inputs = run()
        out = call()
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

    end = "_backward_data" if "softmax" in case.name else "_backward"
    yield case
    yield replace(
        case, name=case.name + end, make=backward, flops=flops, bytes=moved, backward=True
    )


# Matrix products: m, n and the inner length k. "nt" is the forward pass of a linear layer, whose
# weights are stored as (n, k); "nn" is the gradient of its input and "tn" that of its weights.
_SQUARES = (256, 512, 1024, 2048, 4096, 8192)
_LINEAR = _read(
    """ntx8192x768x768 ntx8192x2304x768 ntx8192x3072x768 ntx8192x768x3072 ntx16384x2048x2048
    ntx16384x5632x2048 ntx16384x512x2048 ntx16384x32000x2048 ntx8192x50257x768 ntx2048x2048x2048
    ntx512x768x768 ntx64x4096x25088 ntx64x1024x512 ntx256x1000x2048 ntx200704x96x384
    ntx200704x384x96 ntx8192x50304x768 ntx8192x30522x768 nnx8192x768x30522 tnx30522x768x8192
    ntx8192x1023x769 ntx4097x4097x4097 ntx4096x4100x4096 ntx4096x4096x4098 ntx8192x65x384
    ntx4096x4096x512 ntx4096x4096x128 ntx1408x1536x4096 ntx1536x1536x4096 nnx8192x768x3072
    nnx16384x2048x5632 nnx16384x2048x32000 nnx8192x768x50257 tnx3072x768x8192 tnx768x768x8192
    tnx5632x2048x16384 tnx32000x2048x16384 tnx50257x768x8192 tnx384x96x200704 tnx768x768x1024"""
)
_BATCHED = _read("96x1024x1024x64 768x128x128x64 96x1024x64x1024 4096x49x49x32")
_OTHER_TYPES = _read(
    """ntx4096x4096x4096 ntx8192x3072x768 ntx8192x768x768 ntx1024x1024x1024 tnx3072x768x8192
    tnx768x768x1024"""
)


def _matmuls(device: Device) -> Iterator[Case]:
    for side in _SQUARES:
        yield _matmul(device, "bf16", "nt", 1, side, side, side)
    for layout, m, n, k in _LINEAR:
        yield _matmul(device, "bf16", layout, 1, m, n, k)
    for batch, m, n, k in _BATCHED:
        yield _matmul(device, "bf16", "nn", batch, m, n, k)
    for precision in ("fp16", "tf32", "fp32"):
        for layout, m, n, k in _OTHER_TYPES:
            yield _matmul(device, precision, layout, 1, m, n, k)


def _matmul(
    device: Device, precision: str, layout: str, batch: int, m: int, n: int, k: int
) -> Case:
    batch, m, n, k = (device.number(each) for each in (batch, m, n, k))

    def make() -> Call:
        left = device.random(batch, *((k, m) if layout == "tn" else (m, k)), precision=precision)
        right = device.random(batch, *((n, k) if layout == "nt" else (k, n)), precision=precision)
        left = left.transpose(1, 2) if layout == "tn" else left
        right = right.transpose(1, 2) if layout == "nt" else right
        if batch == 1:
            a, b = left[0], right[0]
            return lambda: torch.mm(a, b)
        return lambda: torch.bmm(left, right)

    moved = batch * (m * k + n * k + m * n) * TYPES[precision].itemsize
    return Case(
        kind="matmul",
        name="mm" if batch == 1 else "bmm",
        precision=precision,
        make=make,
        size=(batch, m, n, k),
        shape=(batch, m, n, k),
        flops=2.0 * batch * m * n * k,
        bytes=moved,
        layout=layout,
    )


# batch, channels, side of the image, output channels, side of the kernel, stride, groups, and the
# dilation if it exceeds 1
_IMAGES = _read(
    """64x3x224x64x7x2x1 64x64x56x64x3x1x1 64x128x28x128x3x1x1 64x256x14x256x3x1x1
    64x512x7x512x3x1x1 256x64x56x64x3x1x1 64x128x56x128x3x2x1 32x64x224x64x3x1x1
    32x256x56x256x3x1x1 64x64x56x256x1x1x1 64x256x56x64x1x1x1 64x1024x14x256x1x1x1
    64x512x28x1024x1x2x1 64x16x112x96x1x1x1 64x144x56x24x1x1x1 64x240x28x80x1x1x1
    128x480x1x120x1x1x1 64x96x112x96x3x2x96 64x144x56x144x3x1x144 64x384x14x384x3x1x384
    64x240x28x240x5x1x240 64x96x56x96x7x1x96 64x384x14x384x7x1x384 64x256x56x256x3x1x32
    64x512x14x512x3x1x32 64x3x224x768x16x16x1 4x512x64x256x3x1x1
    128x3x224x32x3x2x1 64x3x224x96x4x4x1 64x240x28x240x5x2x240 64x512x28x128x1x1x1
    64x2048x7x512x1x1x1 16x256x64x256x3x1x1x2 16x2048x64x256x3x1x1x12"""
)
_WIDE_IMAGES = _read("64x64x56x64x3x1x1 64x256x56x64x1x1x1 64x144x56x144x3x1x144")


def _convolutions(device: Device) -> Iterator[Case]:
    for image in _IMAGES:
        for layout in ("nchw", "nhwc"):
            yield from _convolution(device, "bf16", layout, *image)
    for precision in ("fp16", "tf32", "fp32"):
        for image in _WIDE_IMAGES:
            yield from _convolution(device, precision, "nchw", *image)
    yield from _convolution(device, "tf32", "nhwc", *_WIDE_IMAGES[0])


def _operands(
    device: Device, shapes: Sequence[Sequence[int]], precision: str, layout: str
) -> tuple[torch.Tensor, ...]:
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return tuple(
        device.random(*shape, precision=precision).contiguous(memory_format=form)
        for shape in shapes
    )


def _convolution(
    device: Device,
    precision: str,
    layout: str,
    batch: int,
    inputs: int,
    side: int,
    outputs: int,
    kernel: int,
    stride: int,
    groups: int,
    dilation: int = 1,
) -> Iterator[Case]:
    batch = device.number(batch)
    side = max(kernel, device.number(side, 8))
    padding = kernel // 2 * dilation if stride < kernel or kernel == 1 else 0
    out = (side + 2 * padding - (kernel - 1) * dilation - 1) // stride + 1
    options = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    first = inputs == 3  # the gradient of images is not computed
    shapes = (
        (batch, inputs, side, side),
        (outputs, inputs // groups, kernel, kernel),
        (batch, outputs, out, out),
    )

    def forward() -> Call:
        images, weights, _ = _operands(device, shapes, precision, layout)
        return lambda: _aten.convolution(images, weights, None, *options)

    def backward() -> Call:
        images, weights, grad = _operands(device, shapes, precision, layout)
        mask = [not first, True, False]
        return lambda: _aten.convolution_backward(grad, images, weights, None, *options, mask)

    depth, pixels = inputs // groups * kernel * kernel, batch * out * out
    counts = [prod(shape) for shape in shapes]
    item = TYPES[precision].itemsize
    case = Case(
        kind="conv",
        name="convolution",
        precision=precision,
        make=forward,
        size=(groups, pixels, outputs // groups, depth),
        shape=(batch, inputs, side, side, outputs, kernel, stride, groups)
        + ((dilation,) if dilation > 1 else ()),
        flops=2.0 * pixels * outputs * depth,
        bytes=sum(counts) * item,
        layout=layout,
    )
    yield case
    yield replace(
        case,
        name="convolution_backward",
        make=backward,
        flops=case.flops * (1 if first else 2),
        bytes=case.bytes + (counts[1] + (0 if first else counts[0])) * item,
        backward=True,
    )


# batch, heads, heads of keys, queries, keys, width of a head; 1 if causal, 2 with a given mask
_ATTENTION = _read(
    """8x12x12x1024x1024x64x1 32x12x12x1024x1024x64x1 64x12x12x197x197x64x0 64x12x12x128x128x64x0
    32x16x16x512x512x64x0 4x32x32x2048x2048x64x1 4x32x4x2048x2048x64x1 1x32x32x2048x2048x64x1
    4x16x16x2048x2048x128x1 1x16x16x8192x8192x128x1 1x16x16x8192x8192x128x0 4096x3x3x49x49x32x0
    16x12x12x512x512x64x2"""
)


def _attentions(device: Device) -> Iterator[Case]:
    for shape in _ATTENTION:
        yield from _attention(device, "bf16", *shape)
    for precision in ("fp16", "tf32", "fp32"):
        yield from _attention(device, precision, *_ATTENTION[0])
    yield from _attention(device, "fp32", *_ATTENTION[2])


def _attention(
    device: Device,
    precision: str,
    batch: int,
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    width: int,
    mask: int,
) -> Iterator[Case]:
    batch, queries, keys = (device.number(each) for each in (batch, queries, keys))
    options: dict[str, Any] = {"is_causal": mask == 1}
    if heads != key_heads:
        options["enable_gqa"] = True
    if mask == 2:
        size = batch, 1, queries, keys
        options["attn_mask"] = torch.ones(size, dtype=torch.bool, device=device.kind)

    def run() -> tuple[Call, Sequence[torch.Tensor]]:
        q, k, v = (
            # as a linear layer writes them: the heads of one position are adjacent
            device.random(batch, count, number, width, precision=precision)
            .transpose(1, 2)
            .requires_grad_()
            for count, number in ((queries, heads), (keys, key_heads), (keys, key_heads))
        )
        return lambda: F.scaled_dot_product_attention(q, k, v, **options), (q, k, v)

    item = TYPES[precision].itemsize
    ends = batch * heads * queries * width * item
    middle = 2 * batch * key_heads * keys * width * item
    whole = 2.0 * batch * heads * queries * keys * width * (0.5 if mask == 1 else 1.0)
    case = Case(
        kind="attention",
        name="scaled_dot_product_attention",
        precision=precision,
        make=lambda: run()[0],
        size=(batch * heads, queries, keys, width),
        shape=(batch, heads, key_heads, queries, keys, width),
        flops=whole * 2,
        bytes=2 * ends + middle,
        more={"causal": mask == 1, "mask": mask == 2},
    )
    yield from _both(case, run, moved=4 * ends + 2 * middle, flops=whole * 5)


# kind, steps, batch, inputs, width, layers
_CELLS = _read(
    """lstmx256x64x512x512x1 lstmx256x512x512x512x1 lstmx256x64x1024x1024x2 lstmx64x64x256x256x1
    grux256x64x512x512x1 lstmx128x64x650x650x1 lstmx128x512x650x650x1 lstmx256x64x1024x1024x1
    lstmx128x512x1024x1024x1"""
)


def _recurrent(device: Device) -> Iterator[Case]:
    for cell in _CELLS:
        yield from _cell(device, "bf16", *cell)
    for precision in ("fp16", "tf32", "fp32"):
        yield from _cell(device, precision, *_CELLS[0])


def _cell(
    device: Device,
    precision: str,
    name: str,
    steps: int,
    batch: int,
    inputs: int,
    width: int,
    layers: int,
) -> Iterator[Case]:
    steps, batch, inputs, width = (device.number(each) for each in (steps, batch, inputs, width))
    made = torch.nn.LSTM if name == "lstm" else torch.nn.GRU

    def run() -> tuple[Call, Sequence[torch.Tensor]]:
        cell = made(inputs, width, layers, device=device.kind, dtype=TYPES[precision])
        data = device.random(steps, batch, inputs, precision=precision, grad=True)
        return lambda: cell(data)[0], [data, *cell.parameters()]

    gates, item = 4 if name == "lstm" else 3, TYPES[precision].itemsize
    weights = gates * width * (inputs + width + (layers - 1) * 2 * width)
    moved = (weights + steps * batch * (inputs + layers * width * (gates + 2))) * item
    case = Case(
        kind="recurrent",
        name=name,
        precision=precision,
        make=lambda: run()[0],
        size=(steps, batch, width, inputs),
        shape=(steps, batch, inputs, width, layers),
        flops=2.0 * weights * steps * batch,
        bytes=moved,
        more={"layers": layers},
    )
    yield from _both(case, run, moved=2 * moved, flops=2 * case.flops)


# rows and columns
_NORMED = _read(
    """8192x768 16384x2048 200704x96 100352x192 50176x192 25088x384 12544x384 6272x768 8192x1024
    4096x1024 4096x4096 1024x768"""
)
_IMAGE_SIZES = _read("64x64x112 128x32x112 64x256x56 128x144x56 64x1024x14 128x480x14 64x2048x7")


def _norms(device: Device) -> Iterator[Case]:
    for precision in ("bf16", "fp32"):
        for rows, columns in _NORMED:
            yield from _rows(device, "native_layer_norm", precision, rows, columns)
        yield from _rows(device, "_softmax", precision, 98304, 1024)
        yield from _rows(device, "_fused_rms_norm", precision, 16384, 2048)
        yield from _rows(device, "_log_softmax", precision, 8192, 32000)
    yield from _rows(device, "_log_softmax", "fp32", 8192, 50257)
    yield from _rows(device, "_softmax", "fp32", 786432, 128)
    for layout in ("nchw", "nhwc"):
        for shape in _IMAGE_SIZES:
            yield from _channels(device, "native_batch_norm", "bf16", layout, *shape)
        yield from _channels(device, "native_group_norm", "bf16", layout, 8, 128, 128)
    for precision, layout in (("fp32", "nchw"), ("fp32", "nhwc"), ("fp16", "nchw")):
        yield from _channels(device, "native_batch_norm", precision, layout, 64, 256, 56)
    for precision in ("bf16", "fp32"):
        for name, call in (
            ("sum", lambda x: x.sum()),
            ("sum_rows", lambda x: x.sum(0)),
            ("mean", lambda x: x.mean(-1)),
            ("linalg_vector_norm", torch.linalg.vector_norm),
            ("cumsum", lambda x: x.cumsum(-1)),
        ):
            yield _plain(device, "reduction", name, precision, (16384, 4096), call, 1)
    for rows, columns in _read("4096x1024 8192x3072 100352x192 50176x192 16384x10000"):
        summed = (rows, columns)
        yield _plain(device, "reduction", "sum_rows", "bf16", summed, lambda x: x.sum(0), 1)
    images = (64, 192, 28, 28)
    yield _plain(device, "reduction", "sum_images", "bf16", images, lambda x: x.sum((0, 2, 3)), 1)


def _rows(device: Device, name: str, precision: str, rows: int, columns: int) -> Iterator[Case]:
    """A reduction over the last dimension, with a result for each element."""
    rows = device.number(rows)

    def run() -> tuple[Call, Sequence[torch.Tensor]]:
        data = device.random(rows, columns, precision=precision, grad=True)
        weight, bias = (device.random(columns, precision=precision, grad=True) for _ in range(2))
        if name == "native_layer_norm":
            return lambda: F.layer_norm(data, (columns,), weight, bias), [data, weight, bias]
        if name == "_fused_rms_norm":
            return lambda: F.rms_norm(data, (columns,), weight), [data, weight]
        call = torch.softmax if name == "_softmax" else torch.log_softmax
        return lambda: call(data, -1), [data]

    yield from _normalized(name, precision, (rows, columns), run)


def _channels(
    device: Device, name: str, precision: str, layout: str, batch: int, channels: int, side: int
) -> Iterator[Case]:
    """A normalisation of images. Its parameters have single precision, as with autocast."""
    batch = device.number(batch)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format

    def run() -> tuple[Call, Sequence[torch.Tensor]]:
        data = device.random(batch, channels, side, side, precision=precision)
        data = data.contiguous(memory_format=form).requires_grad_()
        weight, bias = (device.random(channels, precision="fp32", grad=True) for _ in range(2))
        if name == "native_group_norm":
            low, high = (each.detach().to(data.dtype).requires_grad_() for each in (weight, bias))
            return lambda: F.group_norm(data, 32, low, high), [data, low, high]
        mean, var = (torch.ones(channels, device=device.kind) for _ in range(2))
        return (
            lambda: F.batch_norm(data, mean, var, weight, bias, training=True),
            [data, weight, bias],
        )

    yield from _normalized(name, precision, (batch, channels, side, side), run, layout)


def _normalized(
    name: str, precision: str, shape: tuple[int, ...], run: Run, layout: str = ""
) -> Iterator[Case]:
    """An operation whose result has the shape of its operand."""
    each = prod(shape) * TYPES[precision].itemsize
    case = Case(
        kind="reduction",
        name=name,
        precision=precision,
        make=lambda: run()[0],
        shape=shape,
        bytes=each * 2,
        layout=layout,
    )
    return _both(case, run, moved=each * 3)


def _plain(
    device: Device,
    kind: str,
    name: str,
    precision: str,
    shape: tuple[int, ...],
    call: Callable[..., Any],
    moved: float,
    operands: int = 1,
) -> Case:
    """An operation without parameters. `moved` is the number of tensors that it moves."""
    shape = (device.number(shape[0]), *shape[1:])

    def make() -> Call:
        given = [device.random(*shape, precision=precision) for _ in range(operands)]
        return lambda: call(*given)

    return Case(
        kind=kind,
        name=name,
        precision=precision,
        make=make,
        shape=shape,
        bytes=moved * prod(shape) * TYPES[precision].itemsize,
        backward=name.endswith("backward"),
    )


def _pointwise(device: Device) -> Iterator[Case]:
    plain = partial(_plain, device, "pointwise")
    wide = (16384, 4096)
    for precision in ("bf16", "fp32"):
        for name, call, moved, operands in (
            ("add", torch.add, 3, 2),
            ("mul", torch.mul, 3, 2),
            ("gelu", F.gelu, 2, 1),
            ("gelu_backward", _aten.gelu_backward, 3, 2),
            ("silu", F.silu, 2, 1),
            ("silu_backward", _aten.silu_backward, 3, 2),
            ("relu", torch.relu, 2, 1),
            ("threshold_backward", lambda x, y: _aten.threshold_backward(x, y, 0), 3, 2),
            ("tanh", torch.tanh, 2, 1),
            ("sigmoid", torch.sigmoid, 2, 1),
            ("exp", torch.exp, 2, 1),
            ("pow", lambda x: x.pow(2), 2, 1),
            ("add_", lambda x, y: x.add_(y), 3, 2),
            ("native_dropout", lambda x: torch.native_dropout(x, 0.1, True), 2.5, 1),
            ("fill_", lambda x: x.fill_(1.0), 1, 1),
        ):
            yield plain(name, precision, wide, call, moved, operands)
    for rows in (16, 128, 1024, 4096):
        yield plain("add", "bf16", (rows, 2048), torch.add, 3, 2)
        yield plain("gelu", "bf16", (rows, 2048), F.gelu, 2, 1)
    yield plain("hardswish", "bf16", wide, F.hardswish, 2, 1)
    yield plain("add_bias", "bf16", wide, lambda x: x + x[0], 2, 1)
    images = (64, 480, 14, 14)
    yield plain("mul_images", "bf16", images, lambda x: x * x[:, :, :1, :1], 2, 1)
    mixed = _plain(device, "pointwise", "add_mixed", "fp32", (8192, 1024), torch.add, 2.5)

    def add_mixed() -> Call:
        left = device.random(*mixed.shape, precision="fp32")
        right = device.random(*mixed.shape)
        return lambda: left + right

    yield replace(mixed, make=add_mixed)


def _copies(device: Device) -> Iterator[Case]:
    plain = partial(_plain, device, "copy")
    for power in (16, 18, 20, 22, 24, 26, 28, 30):
        shape = (max(1, 2**power // 4096), 1024)
        yield plain("clone", "fp32", shape, torch.clone, 2)
    for rows in (512, 16384):
        shape = (rows, 4096)
        yield plain("_to_copy", "fp32", shape, lambda x: x.bfloat16(), 1.5)
        yield plain("_to_copy", "bf16", shape, lambda x: x.float(), 3)
    for precision in ("bf16", "fp32"):
        heads, halves = (32, 1024, 16, 64), (16384, 4096)
        yield plain("transpose", precision, heads, lambda x: x.transpose(1, 2).contiguous(), 2)
        yield plain("cat", precision, halves, lambda x, y: torch.cat((x, y), -1), 4, 2)
        for channels, side in ((64, 112), (256, 56), (1024, 14)):
            yield _layout(device, precision, "nchw>nhwc", channels, side)
            yield _layout(device, precision, "nhwc>nchw", channels, side)


def _layout(device: Device, precision: str, layout: str, channels: int, side: int) -> Case:
    shape = (64, channels, side, side)
    case = _plain(device, "copy", "contiguous", precision, shape, torch.clone, 2.0)
    forms = torch.contiguous_format, torch.channels_last
    before, after = forms if layout.startswith("nchw") else forms[::-1]

    def make() -> Call:
        data = device.random(*case.shape, precision=precision).contiguous(memory_format=before)
        return lambda: data.contiguous(memory_format=after)

    return replace(case, make=make, layout=layout)


def _indexes(device: Device) -> Iterator[Case]:
    for rows, columns, table in ((8192, 768, 50257), (16384, 2048, 32000), (32768, 256, 32000)):
        for name in ("embedding", "embedding_dense_backward", "index_select", "scatter_add"):
            yield _look_up(device, name, rows, columns, table)
    for layout in ("nchw", "nhwc"):
        for name in ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"):
            yield from _pool(device, name, layout)
        yield from _pool(device, "upsample_nearest2d", layout)
        yield from _pool(device, "upsample_bilinear2d", layout)
    yield from _losses(device)


def _look_up(device: Device, name: str, rows: int, columns: int, table: int) -> Case:
    rows, table = device.number(rows), device.number(table)

    def make() -> Call:
        words = torch.randint(0, table, (rows,), device=device.kind)
        if name == "embedding_dense_backward":
            grad = device.random(rows, columns, precision="fp32")
            return lambda: _aten.embedding_dense_backward(grad, words, table, -1, False)
        weights = device.random(table, columns, precision="fp32")
        if name == "scatter_add":
            data = device.random(rows, columns, precision="fp32")
            return lambda: weights.index_add_(0, words, data)
        if name == "index_select":
            return lambda: weights.index_select(0, words)
        return lambda: F.embedding(words, weights)

    written = rows * columns * 4
    if name == "embedding_dense_backward":
        written = table * columns * 4 + rows * columns * 4
    return Case(
        kind="index",
        name="index_add" if name == "scatter_add" else name,
        precision="fp32",
        make=make,
        shape=(rows, columns, table),
        bytes=written * (1 if "backward" in name else 2),
        backward="backward" in name,
    )


def _pool(device: Device, name: str, layout: str) -> Iterator[Case]:
    shape = (device.number(64), 64, 112, 112)
    if name == "_adaptive_avg_pool2d":
        shape = (device.number(64), 2048, 7, 7)
    elif name.startswith("upsample"):
        shape = (device.number(8), 128, 64, 64)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "max_pool2d_with_indices": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "_adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
        "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2.0),
        "upsample_bilinear2d": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    }
    call = calls[name]

    def run() -> tuple[Call, Sequence[torch.Tensor]]:
        data = device.random(*shape).contiguous(memory_format=form).requires_grad_()
        return lambda: call(data), [data]

    shares = {
        "max_pool2d_with_indices": 0.25 * 5,
        "avg_pool2d": 0.25,
        "_adaptive_avg_pool2d": 1 / 49,
    }
    case = Case(
        kind="index",
        name=name,
        precision="bf16",
        make=lambda: run()[0],
        shape=shape,
        bytes=prod(shape) * 2 * (1 + shares.get(name, 4.0)),
        layout=layout,
    )
    return _both(case, run, moved=case.bytes)


def _losses(device: Device) -> Iterator[Case]:
    for precision, rows, columns in (
        ("bf16", 8192, 50257),
        ("bf16", 16384, 32000),
        ("bf16", 256, 1000),
        ("fp32", 8192, 50257),
    ):
        yield from _loss(device, precision, device.number(rows), columns)


def _loss(device: Device, precision: str, rows: int, columns: int) -> Iterator[Case]:
    """The whole cross entropy, as a model calls it: with autocast its input has half precision."""

    def run() -> tuple[Call, Sequence[torch.Tensor]]:
        data = device.random(rows, columns, precision=precision, grad=True)
        words = torch.randint(0, columns, (rows,), device=device.kind)
        narrow = precision == "bf16" and device.kind != "mps"

        def call() -> torch.Tensor:
            with torch.autocast(device.kind, torch.bfloat16) if narrow else nullcontext():
                return F.cross_entropy(data, words)

        return call, [data]

    moved = rows * columns * (TYPES[precision].itemsize + 4.0)
    case = Case(
        kind="reduction",
        name="cross_entropy",
        precision=precision,
        make=lambda: run()[0],
        shape=(rows, columns),
        bytes=moved,
    )
    return _both(case, run, moved=moved + rows * columns * 4.0)


# optimizer, tensors, elements of each; the bytes per parameter are those of `profile.OPTIMIZERS`
_UPDATES = (
    ("adamw", 100, 1 << 20),
    ("adamw", 300, 1 << 14),
    ("adamw_fused", 100, 1 << 20),
    ("adamw_fused", 300, 1 << 14),
    ("adamw_loop", 30, 1 << 20),
    ("sgd_momentum", 100, 1 << 20),
    ("sgd", 100, 1 << 20),
    ("clip_grad_norm", 100, 1 << 20),
)
_MOVED = {"sgd_momentum": 24, "sgd": 12, "clip_grad_norm": 12}


def _optimizers(device: Device) -> Iterator[Case]:
    for name, tensors, each in _UPDATES:
        tensors, each = device.number(tensors), device.number(each)

        def make(name: str = name, tensors: int = tensors, each: int = each) -> Call:
            return make_update(device, name, tensors, each)

        yield Case(
            kind="optimizer",
            name=name,
            precision="fp32",
            make=make,
            shape=(tensors, each),
            bytes=_MOVED.get(name, 84) * float(tensors * each),
            more={"tensors": tensors},
        )


def make_update(device: Device, name: str, tensors: int, each: int) -> Call:
    """Return a call that runs one step of an optimizer."""
    parameters = [device.random(each, precision="fp32", grad=True) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if name == "clip_grad_norm":
        return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    if name.startswith("sgd"):
        return torch.optim.SGD(parameters, 1e-3, momentum=0.9 if "momentum" in name else 0.0).step
    if name == "adamw_fused":
        return torch.optim.AdamW(parameters, fused=True).step
    return torch.optim.AdamW(parameters, foreach=False if name == "adamw_loop" else None).step


class HostClock:
    """Measures the microseconds that the host takes for calls whose kernels take almost no time."""

    def __init__(self, device: Device) -> None:
        self.device, self.found = device, dict[str, float]()
        self.repeats = 3 if device.small else 300

    def one(self, call: Call, number: int = 1) -> float:
        """Return the microseconds of each of `number` parts of a call."""
        repeats = max(1, self.repeats // number)
        for _ in range(3):
            call()
        self.device.wait()
        times = []
        for _ in range(3):
            begin = perf_counter()
            for _ in range(repeats):
                call()
            self.device.wait()
            times.append((perf_counter() - begin) / repeats / number)
        return round(min(times) * 1e6, 3)

    def pair(self, name: str, step: Callable[[Any], Any], data: torch.Tensor) -> None:
        """Measure an operation of a model, and the backward pass of it."""

        def chain() -> torch.Tensor:
            out = data
            for _ in range(50):
                out = step(out)
            return out

        grad = torch.ones_like(chain())

        def both() -> None:
            chain().backward(grad)  # type: ignore[no-untyped-call]  # of torch

        forward = self.one(chain, 50)
        self.found[f"{name}_us"] = forward
        self.found[f"{name}_backward_us"] = round(max(0.0, self.one(both, 50) - forward), 3)


def time_host(device: Device) -> dict[str, float]:
    """Return the microseconds of the host for operations of models and for steps of optimizers."""
    host = HostClock(device)
    x, y = (device.random(64, 64, precision="fp32") for _ in range(2))
    out = torch.empty_like(x)
    host.found["launch_us"] = host.one(lambda: torch.add(x, y, out=out))
    host.found["op_us"] = host.one(lambda: x + y)
    if device.kind == "cuda" and not device.small:
        gap_s, _, _ = device.time([lambda: torch.add(x, y, out=out)])
        host.found["gap_us"] = round(gap_s * 1e6, 3)
    leaf = device.random(64, 64, precision="fp32", grad=True)
    images = device.random(1, 32, 8, 8, precision="fp32", grad=True)
    heads = device.random(1, 4, 64, 64, grad=True)
    linear = torch.nn.Linear(64, 64, device=device.kind)
    conv = torch.nn.Conv2d(32, 32, 3, padding=1, bias=False, device=device.kind)
    host.pair("forward", lambda each: each * 1.0, leaf)
    host.pair("linear", linear, leaf)
    host.pair("layer_norm", torch.nn.LayerNorm(64, device=device.kind), leaf)
    host.pair("conv", conv, images)
    host.pair("batch_norm", torch.nn.BatchNorm2d(32, device=device.kind), images)
    host.pair("attention", lambda each: F.scaled_dot_product_attention(each, each, each), heads)
    if device.kind != "mps":
        with torch.autocast(device.kind, torch.bfloat16):
            host.pair("linear_bf16", linear, leaf)
            host.pair("conv_bf16", conv, images)
    host.repeats = 3 if device.small else 20
    for name in ("adamw", "adamw_fused", "adamw_loop", "sgd_momentum"):
        low, high = (host.one(make_update(device, name, count, 256)) for count in (20, 220))
        each = max(0.0, (high - low) / 200)
        host.found[f"{name}_tensor_us"] = round(each, 3)
        host.found[f"{name}_step_us"] = round(max(0.0, high - 220 * each), 3)
    return host.found


def time_link(device: Device) -> dict[str, float]:
    """Return the bytes per second between host and device."""
    if device.kind != "cuda":
        return {}
    size = 256 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    plain = torch.ones(size, dtype=torch.uint8)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    calls: dict[str, Call] = {
        "h2d": lambda: there.copy_(pinned, non_blocking=True),
        "d2h": lambda: pinned.copy_(there, non_blocking=True),
        "h2d_pageable": lambda: there.copy_(plain),
    }
    found: dict[str, float] = {}
    for name, call in calls.items():
        call()
        found[name] = round(size / device._clock([call], 3))
    return found


def describe(device: Device) -> dict[str, Any]:
    """Return the fields of the profile that name the device and the software."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "date": strftime("%Y-%m-%d"),
        "device": device.kind,
        "runtime": "",
        "smoke": device.small,
    }
    if device.kind == "cuda":
        facts = torch.cuda.get_device_properties(0)
        rocm = getattr(torch.version, "hip", None)
        about |= {
            "device": facts.name,
            "memory_mib": facts.total_memory >> 20,
            "processors": facts.multi_processor_count,
            "l2_bytes": getattr(facts, "L2_cache_size", 0),
            "runtime": f"ROCm {rocm}" if rocm else f"CUDA {torch.version.cuda}",
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # of torch
        }
    elif device.kind == "mps":
        about |= {"device": "Apple GPU", "memory_mib": torch.mps.recommended_max_memory() >> 20}
    return about


def find_kind() -> str:
    """Return PyTorch's name of the kind of this machine's accelerator."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def say(name: str, value: Any) -> None:
    """Print one part of the profile."""
    sys.stdout.write(f"{MARK}{json.dumps({name: value}, separators=(',', ':'))}\n")
    sys.stdout.flush()


def warm_up(device: Device) -> None:
    square = device.random(device.number(4096), device.number(4096))
    ends = perf_counter() + (0 if device.small else _WARM_S)
    while perf_counter() < ends:
        for _ in range(10):
            torch.mm(square, square)
        device.wait()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times kernels on this machine's accelerator.")
    parser.add_argument("--seconds", type=float, default=110, help="when to stop")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the program")
    chosen = parser.parse_args(given)
    begin = perf_counter()
    kind = find_kind()
    if kind == "cpu" and not chosen.smoke:
        say("error", "PyTorch sees no accelerator on this machine")
        return 1
    device = Device(kind, small=chosen.smoke or kind == "cpu")
    torch.manual_seed(0)
    say("about", describe(device))
    warm_up(device)
    say("host", time_host(device))
    say("link", time_link(device))
    cases = list(list_cases(device))
    say("total", len(cases))
    skipped = []
    for index, case in enumerate(cases):
        if perf_counter() - begin > chosen.seconds:
            skipped = [f"{each.name} {each.precision} {each.shape}" for each in cases[index:]]
            break
        say("row", measure(case, device))
    say("end", {"seconds": round(perf_counter() - begin, 1), "skipped": skipped})
    return 0


if __name__ == "__main__":
    sys.exit(main())
