"""Estimates the time of one kernel on a device. A kernel takes the time of its arithmetic at the
rate of its shape, or of its memory traffic at the bandwidth of its shape, whichever is longer.

The constants were read from the times of about 400 kernels alone on one H200 (`cavvy bench
--kernels`, 2026-11-27, PyTorch 2.11), except `channel_cudnn`, which was chosen by steps of
ResNet-50. The times of kernels that were measured correct this formula for similar shapes
(`measured.py`).
"""

from collections.abc import Mapping
from math import ceil

from cavvy.domain.values import Struct
from cavvy.planner.device_rates import DeviceRates, has_half_lanes, slower_than_h200
from cavvy.planner.estimate.profile import KernelProfile, StepSettings


class KernelSetting(Struct, frozen=True, kw_only=True):
    """The conditions under which a kernel runs: the device, the step's settings, the precision, the
    batch as a multiple of the profile's batch, and whether float32 products of a step in half
    precision use TF32.
    """

    device: DeviceRates
    run: StepSettings
    precision: str
    scale: float
    tf32: bool = False


SCATTERS = frozenset({"index_add", "scatter", "scatter_", "scatter_add", "scatter_reduce"})
# kinds whose time is limited by arithmetic
PRODUCTS = frozenset({"matmul", "recurrent", "conv", "attention"})

# Half-precision products with inner length k reach k / (k + depth) of the rate. For a slower
# precision, the depth is multiplied by (its peak / the half-precision peak).
_DEPTH = 160
# shares of the rate if the rows of a matrix start at multiples of 8, 4 or 2 bytes only
_ALIGNED = {0.5: 0.45, 0.25: 0.24, 0.125: 0.14}

# convolutions, as shares of the rate of large matrix products
_CONV, _CONV_BACKWARD = 0.95, 0.88
_WIDE_CONV = 0.75  # in tf32 and fp32
# Windows of 3 x 3 that move by one pixel are multiplied by Winograd's algorithm in fp32: 16
# multiplications for 4 results of 36 (Lavin, Gray 2016, "Fast Algorithms for Convolutional Neural
# Networks", F(2x2, 3x3)). Assumed only for devices with half as many fp32 results per clock as an
# H200, whose fp32 kernels were measured.
_WINOGRAD = 36 / 16
_CONV_DEPTH = 90.0  # the same as `_DEPTH`
_CONV_COLUMNS = 32.0  # Convolutions with n results per pixel reach n / (n + columns).
_GROUPED_COLUMNS = 155.0  # the channels of a group that would reach the full rate

# the matrix products of fused attention in half precision on an H200
_ATTENTION, _ATTENTION_BACKWARD = 0.78, 0.66
_WIDE_ATTENTION = 0.42  # attention in tf32 and fp32, as a share of the fp32 peak

# Real bandwidths grow more slowly than those of the data sheets: with the power (1 - falloff).
_BANDWIDTH_FALLOFF = 0.03
# shares of the bandwidth
_OPERANDS = 0.80  # reading operands and writing results of products
_POINTWISE = 0.87  # also copies
_WIDENING = 0.60  # pointwise kernels and copies with float32 results of narrow operands
_SCATTER = 0.23
_STORED_SCORES = 0.55  # the kernels of attention that is not fused
# the same, forward and backward, by kind
_SHARES: Mapping[str, tuple[float, float]] = {
    "layer_norm": (0.80, 0.47),
    "softmax": (0.55, 0.55),
    "pooling": (0.23, 0.09),  # also interpolation
    "look_up": (0.60, 0.15),  # embeddings and indexing
    "reduction": (0.75, 0.75),  # sums, means, maxima and scans (cumulative sums)
    "group_norm": (0.13, 0.18),
    "batch_norm": (0.60, 0.60),
    "batch_norm_last": (0.17, 0.30),  # in channels-last memory
}

# Nanoseconds for an element or row on an H200; on other devices, they follow `slower_than_h200`.
_IRREGULAR = 0.0031  # an element whose address is computed
_ROW, _ROW_BACKWARD = 1.36, 3.2  # a row of a normalization
_SUM_ELEMENT = 0.00075  # an element of sums over rows, as for biases
_SUM_NARROW = 0.006  # the same, if a row has few elements
# Batch normalization in NCHW memory gives each channel to one block of threads, which takes this
# long for an element (aten/src/ATen/native/cuda/Normalization.cuh).
_CHANNEL, _CHANNEL_BACKWARD = 0.83, 1.73
_CHANNEL_CUDNN = 0.75  # times as long in float16, which cuDNN computes
# The conversion of convolutions between NCHW and channels-last memory
_LAYOUT = 0.0018
# Padding channels that are no multiple of 8, as those of an image: for 8 channels of a pixel, which
# are a vector of 16 bytes
_IMAGE = 0.120
# Depthwise convolutions, by cuDNN (in float16 or channels-last memory) or by PyTorch's own kernels,
# forward and backward: a result, and an element of its window
_DEPTHWISE = {
    (False, False): (0.0035, 0.00065),
    (False, True): (0.012, 0.00205),
    (True, False): (0.0010, 0.00014),
    (True, True): (0.0030, 0.00043),
}

# microseconds of a time step of a recurrent layer, without the arithmetic that exceeds them
_RECURRENT, _RECURRENT_BACKWARD = 9.0, 12.0
_RECURRENT_RATE = 0.45  # share of the rate of large matrix products

_H200_FLOPS, _H200_BANDWIDTH = 989.4e12, 4.8e12

# Seconds from the start of an empty kernel to the start of the next on a busy H200 (`gap_us`).
_GAP_S = 2e-6
# Arithmetic and memory traffic of one kernel overlap. If they alone take a and b, both together
# take (a^3 + b^3)^(1/3).
_OVERLAP = 3
# Library kernels compute tiles of about 128 x 128 results. If a product has fewer tiles than the
# device has processors (an H200 has 132), kernels split inner lengths of more than 512.
_TILE, _SPLIT, _PROCESSORS = 128, 512, 132
# Rows and columns of a product are padded to a multiple of this, in half and in full precision
# (NVIDIA, "Matrix Multiplication Background User's Guide": dimensions aligned to 128 bytes).
_PAD_HALF, _PAD_WIDE, _PAD_CONV = 64, 32, 32
_PAD_DEPTH = 32  # the part of the inner length that one iteration of a library kernel multiplies
_NARROW = 256  # a row of fewer elements is summed more slowly
_BLOCKS = 220  # channels of a batch normalization that an H200 handles at the same time

# Fused attention, from published measurements of the kernels of FlashAttention-2 alone, not from
# steps of models: forward and backward on an H100 by number of keys and width of heads (Shah et al.
# 2024, "FlashAttention-3", figures 5 and 6), and the best shares of the peak on an A100 (Dao 2023,
# "FlashAttention-2": 73 % forward, 63 % backward).
#
# The share of the rate of large products falls with this power of the half-precision peak, because
# the kernels do not use the newest instructions.
_ATTENTION_FALLOFF = 0.42
# FP32 operations for the softmax of one score, forward and backward
_SOFTMAX, _SOFTMAX_BACKWARD = 10, 24
# A row of queries takes as long as if it had this many more keys: for incomplete blocks and for the
# start and end of a row. The backward pass has larger blocks. Causal attention also computes the
# whole of the blocks on the diagonal, and its rows differ in length.
_MORE_KEYS, _MORE_KEYS_BACKWARD, _MORE_KEYS_CAUSAL = 80, 250, 250

_NORMS = {
    "native_group_norm": "group_norm",
    "native_group_norm_backward": "group_norm",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm",
    "_fused_rms_norm": "layer_norm",
    "_fused_rms_norm_backward": "layer_norm",
    "_softmax": "softmax",
    "_softmax_backward_data": "softmax",
    "_log_softmax": "softmax",
    "_log_softmax_backward_data": "softmax",
}


def kernel_time(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the seconds of one kernel."""
    moved = moved_bytes(kernel, setting)
    kind = name_kind(kernel)
    if kernel.kind == "recurrent":
        return _recurrent(kernel, setting)
    if kind == "depthwise":
        return _depthwise(kernel, moved, setting) + _GAP_S
    seconds = _moving(moved, kind, kernel, setting)
    if kernel.kind in PRODUCTS:
        arithmetic = _arithmetic(kernel, kind, setting)
        seconds = float((arithmetic**_OVERLAP + seconds**_OVERLAP) ** (1 / _OVERLAP))
        return seconds + _extra(kernel, moved, setting) + _GAP_S
    if setting.run.compile:
        return seconds  # The compiler fuses many kernels into a few.
    return _elements(kernel, kind, seconds, setting) + _GAP_S


def moved_bytes(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the bytes that a kernel moves at the setting's batch."""
    moved = kernel.fused_bytes if setting.run.compile else kernel.bytes
    fixed = min(kernel.fixed_bytes, moved)
    return (moved - fixed) * setting.scale + fixed


def bandwidth_of(device: DeviceRates) -> float:
    """Return the bandwidth in bytes per second, of which kernels reach some share."""
    ratio = _H200_BANDWIDTH / device.bandwidth
    return float(device.bandwidth * ratio**_BANDWIDTH_FALLOFF)


def _density(device: DeviceRates) -> float:
    """Return the half-precision FLOPs of a processor per clock, as a multiple of the H200's."""
    return min(2.0, device.half / _H200_FLOPS * slower_than_h200(device))


def _moving(moved: float, kind: str, kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the seconds of memory traffic. Kernels that reach a small share of an H200's bandwidth
    wait for instructions, whose time does not depend on the bandwidth of a device.
    """
    share = _share(kind, kernel, setting)
    seconds = moved / (bandwidth_of(setting.device) * max(share, _POINTWISE))
    if share >= _POINTWISE or kernel.kind in PRODUCTS:
        return moved / (bandwidth_of(setting.device) * share)
    instructions = moved / (_H200_BANDWIDTH * share) * slower_than_h200(setting.device)
    return max(seconds, instructions)


def name_kind(kernel: KernelProfile) -> str:
    """Return the kind that determines a kernel's rate; the result is more specific than
    `kernel.kind`."""
    if kernel.kind == "conv" and kernel.size[0] > 1:
        return "depthwise" if kernel.size[2] <= 1 else "grouped_conv"
    if kernel.kind == "reduction":
        if "batch_norm" in kernel.name:
            return "batch_norm"
        return _NORMS.get(kernel.name, "reduction")
    if kernel.kind == "index":
        return "pooling" if "pool" in kernel.name or "upsample" in kernel.name else "look_up"
    return kernel.kind


def is_half(kernel: KernelProfile, precision: str) -> bool:
    """Return whether a kernel computes in half precision."""
    return not kernel.wide and precision in ("bf16", "fp16", "fp8")


def in_tf32(kernel: KernelProfile, setting: KernelSetting) -> bool:
    """Return whether a product uses TF32."""
    if is_half(kernel, setting.precision):
        return False
    return setting.precision == "tf32" or (setting.tf32 and setting.precision != "fp32")


def in_fp32(kernel: KernelProfile, setting: KernelSetting) -> bool:
    """Return whether a product computes without tensor units."""
    if kernel.kind not in PRODUCTS or is_half(kernel, setting.precision):
        return False
    return not in_tf32(kernel, setting) or setting.device.tf32 <= setting.device.fp32


def is_last(kernel: KernelProfile, setting: KernelSetting) -> bool:
    """Return whether a convolution or batch normalization works in channels-last memory."""
    if kernel.kind == "reduction":
        return setting.run.channels_last or bool(kernel.size[3])
    return setting.run.channels_last or bool(kernel.window and kernel.window[4])


def _share(kind: str, kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the share of the bandwidth that a kernel reaches."""
    if kind in ("matmul", "conv", "grouped_conv", "attention"):
        return _OPERANDS
    if kind in ("pointwise", "copy"):
        elements = kernel.size[0]
        # the bytes of an element show the conversion: 2 are read and 4 written
        if kernel.name == "_to_copy" and kernel.wide and elements and kernel.bytes < 8 * elements:
            return _WIDENING
        return _POINTWISE
    if kernel.name in SCATTERS:
        return _SCATTER
    if kernel.name == "nll_loss_backward":  # It only writes, except at the targets.
        return 2 * _POINTWISE
    if kind == "batch_norm" and is_last(kernel, setting) and setting.precision != "fp16":
        kind = "batch_norm_last"  # In float16, cuDNN computes it.
    is_backward = kernel.backward or kernel.name.endswith("_backward")
    return _SHARES.get(kind, (_POINTWISE, _POINTWISE))[is_backward]


def _elements(kernel: KernelProfile, kind: str, seconds: float, setting: KernelSetting) -> float:
    """Return the seconds of a kernel that moves data and takes at least `seconds`. Some kernels
    take longer for the addresses of elements, or because few blocks of threads work.
    """
    slower = 1e-9 * slower_than_h200(setting.device)
    if kind in ("pointwise", "copy") and kernel.size[3]:
        each = _IRREGULAR * kernel.size[3]
        return max(seconds, kernel.size[0] * setting.scale * each * slower)
    rows, columns = kernel.size[0] * setting.scale, kernel.size[1]
    if kind == "layer_norm" and columns:
        each = _ROW_BACKWARD if kernel.backward else _ROW
        return seconds + rows * each * slower
    if kernel.name == "sum" and kernel.size[3]:
        each = _SUM_NARROW if columns < _NARROW else _SUM_ELEMENT
        return max(seconds, rows * columns * each * slower) + 3 * _GAP_S
    if kind == "batch_norm" and not is_last(kernel, setting):
        return max(seconds, _channels(kernel, setting) * slower)
    return seconds


def _channels(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the nanoseconds of batch normalization in NCHW memory, on an H200."""
    samples, channels, pixels, _ = kernel.size
    if not channels:  # a profile of an earlier version: about the average of residual networks
        channels, samples = 256, 1
        pixels = int(kernel.bytes / (8 if kernel.backward else 4) / channels)
    elements = samples * pixels * setting.scale
    blocks = max(1.0, channels / _BLOCKS)
    if setting.precision == "fp16" and not kernel.wide:
        blocks *= _CHANNEL_CUDNN
    if kernel.backward:
        return elements * _CHANNEL_BACKWARD * blocks
    write = 4 * elements * channels / (_H200_BANDWIDTH * _POINTWISE) * 1e9
    return elements * _CHANNEL * blocks + write


def _recurrent(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the seconds of a recurrent layer's products, one time step after the other."""
    steps, _, columns, depth = (max(1, each) for each in kernel.size)
    latency = _RECURRENT_BACKWARD if kernel.backward else _RECURRENT
    is_narrow = is_half(kernel, setting.precision)
    if is_narrow and _alignment(min(columns, depth), 2) < 1:
        latency *= 1.7  # cuBLAS has only slower kernels for such widths.
    if not is_narrow:
        latency *= 1.9 if in_tf32(kernel, setting) else 2.8
    rate = _rate(kernel, setting) * _RECURRENT_RATE
    arithmetic = kernel.flops * setting.scale / rate
    return steps * latency * 1e-6 * slower_than_h200(setting.device) + arithmetic


def _depthwise(kernel: KernelProfile, moved: float, setting: KernelSetting) -> float:
    """Return the seconds of a convolution with one channel per group."""
    groups, pixels, columns, depth = kernel.size
    results = groups * pixels * columns * setting.scale
    if kernel.backward and kernel.window:  # The gradient of the input has more elements.
        results *= kernel.window[3] ** 1.4
    by_cudnn = is_last(kernel, setting) or setting.precision == "fp16"
    each, tap = _DEPTHWISE[by_cudnn, kernel.backward]
    window = kernel.window[1] if kernel.window else depth
    seconds = results * (each + tap * window) * 1e-9 * slower_than_h200(setting.device)
    return max(seconds, moved / (bandwidth_of(setting.device) * _OPERANDS))


def _arithmetic(kernel: KernelProfile, kind: str, setting: KernelSetting) -> float:
    """Return the seconds that the arithmetic of a kernel takes."""
    wide = not is_half(kernel, setting.precision)
    groups, rows, columns, depth = _shape(kernel, setting.scale)
    rate = _rate(kernel, setting)
    flops = kernel.flops * setting.scale
    if kind == "attention":
        if wide:
            return flops / (setting.device.fp32 * _WIDE_ATTENTION)
        return _attention(kernel, setting)
    if kind == "grouped_conv":
        return flops / (rate * min(1.0, columns / (_GROUPED_COLUMNS * _density(setting.device))))
    slower = _peak(kernel, setting) / setting.device.half
    if kind == "conv":
        narrow = _CONV_BACKWARD if kernel.backward else _CONV
        rate *= _WIDE_CONV if wide else narrow
        rate *= depth / (depth + _CONV_DEPTH * slower)
        rate *= columns / (columns + _CONV_COLUMNS)
        rate *= _WINOGRAD if _is_winograd(kernel, setting) else 1.0
        return flops * _padded(columns, _PAD_CONV) * _padded(depth, _PAD_CONV) / rate
    pad = _PAD_WIDE if wide else _PAD_HALF
    tiles = groups * ceil(rows / _TILE) * ceil(columns / _TILE) * max(1.0, depth / _SPLIT)
    busy = min(1.0, max(0.02, tiles / _PROCESSORS))
    # Padding is multiplied like data. The fixed cost of a result, which `depth` states as an inner
    # length, occurs only for the results that are written.
    work = _padded(rows, pad) * _padded(columns, pad) * _padded(depth, _PAD_DEPTH)
    work += _DEPTH * slower / depth
    return flops * work / (rate * busy * align(kernel, setting))


def _is_winograd(kernel: KernelProfile, setting: KernelSetting) -> bool:
    """Return whether a dense convolution is multiplied by Winograd's algorithm."""
    is_small = bool(kernel.window) and kernel.window[1] == 9 and kernel.window[3] == 1
    dense = len(kernel.window) == 5  # without dilation
    return is_small and dense and has_half_lanes(setting.device) and in_fp32(kernel, setting)


def align(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the share of the rate that a matrix product reaches with the alignment of its
    matrices' rows in memory. Those of a gradient of parameters are as long as its result is wide
    and high (NVIDIA, "Matrix Multiplication Background User's Guide", section 4).
    """
    _, rows, columns, depth = (max(1, each) for each in kernel.size)
    lengths = (rows, columns) if kernel.fixed_result else (columns, depth)
    is_narrow = is_half(kernel, setting.precision)
    if not is_narrow and not in_tf32(kernel, setting):
        return 1.0
    width = 2 if is_narrow else 4
    found = min(_alignment(each, width) for each in lengths)
    # Instructions that load single elements take this long, even where the peak is lower.
    share = min(1.0, _ALIGNED.get(found, 1.0) / _density(setting.device))
    return share**0.5 if setting.run.compile else share  # The compiler pads some matrices.


def _alignment(length: int, width: int) -> float:
    """Return the largest power of 2 that divides a row's bytes, at most 16, as a share of 16."""
    size = length * width
    return min(1.0, (size & -size) / 16)


def _attention(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the seconds of fused attention in half precision: its matrix products, and the softmax
    of its scores. Each row of queries costs additional time. The formula adds a number of keys to
    each row to represent this time.
    """
    keys, width = max(1, kernel.size[2]), max(1, kernel.size[3])
    products = 5 if kernel.backward else 2
    flops = kernel.flops * setting.scale
    share = _ATTENTION_BACKWARD if kernel.backward else _ATTENTION
    share = min(1.0, share * (_H200_FLOPS / setting.device.half) ** _ATTENTION_FALLOFF)
    more = _MORE_KEYS_BACKWARD if kernel.backward else _MORE_KEYS
    if is_causal(kernel):
        more += _MORE_KEYS_CAUSAL
    scores = flops / (products * 2.0 * width)
    softmax = _SOFTMAX_BACKWARD if kernel.backward else _SOFTMAX
    seconds = flops / (_rate(kernel, setting) * share) + scores * softmax / setting.device.fp32
    return float(seconds * (1 + more / keys))


def is_causal(kernel: KernelProfile) -> bool:
    """Return whether attention computes only half of its scores."""
    heads, queries, keys, width = (max(1, each) for each in kernel.size)
    products = 5 if kernel.backward else 2
    return kernel.flops < 0.75 * products * 2.0 * heads * queries * keys * width


def _padded(size: float, step: int) -> float:
    """Return the factor by which a size grows when it is rounded up to a multiple of `step`."""
    return ceil(size / step) * step / size


def _shape(kernel: KernelProfile, scale: float) -> tuple[float, float, float, float]:
    """Return the shape as a matrix product (groups, rows, columns, inner length) for another batch
    size. In most matrix products, the batch size scales the number of groups. If one of the two
    matrices contains the model's parameters, the batch size scales the number of rows. If the
    product is a gradient of parameters, the product sums over the batch, so the batch size scales
    the inner length.
    """
    groups, rows, columns, depth = (max(1.0, float(each)) for each in kernel.size)
    if kernel.kind == "matmul" and kernel.fixed_result:
        return groups, rows, columns, max(1.0, depth * scale)
    if kernel.kind == "conv" or kernel.fixed_bytes:
        return groups, max(1.0, rows * scale), columns, depth
    if groups > 1:
        return max(1.0, groups * scale), rows, columns, depth
    return groups, max(1.0, rows * scale), columns, depth


def _extra(kernel: KernelProfile, moved: float, setting: KernelSetting) -> float:
    """Return how many seconds a kernel would save if the step used channels-last memory or fused
    attention, and what the conversion of an image costs.
    """
    if kernel.kind == "conv" and is_half(kernel, setting.precision):
        return _conversion(kernel, moved, setting)
    if kernel.kind == "attention" and setting.run.math_attention:
        heads, queries, keys, _ = kernel.size
        # Scores, mask, softmax and product are each written to memory and read back.
        passes = 10 if kernel.backward else 8
        scores = heads * queries * keys * setting.scale * (4 if kernel.wide else 2)
        return passes * scores / (bandwidth_of(setting.device) * _STORED_SCORES)
    return 0.0


def _conversion(kernel: KernelProfile, moved: float, setting: KernelSetting) -> float:
    """Return the seconds of the kernels that convert a convolution's operands and results. The
    libraries multiply in channels-last memory. Only a product of whole images, whose rows are
    aligned, needs no conversion.
    """
    slower = 1e-9 * slower_than_h200(setting.device)
    inputs, window, pixels, stride = kernel.window[:4] or (64, 9, 64, 1)
    seconds, elements = 0.0, moved / 2
    if kernel.backward:
        elements *= 4 / 3  # Both gradients read the gradient of the result.
    if (inputs * kernel.size[0]) % 8:
        vectors = kernel.size[1] * setting.scale * stride * stride * ceil(inputs / 8)
        seconds += vectors * _IMAGE * slower * (0.7 if kernel.backward else 1.0)
    is_product = window == 1 and stride == 1 and pixels % 8 == 0
    if is_last(kernel, setting) or is_product:
        return seconds
    return seconds + elements * _LAYOUT * slower + (8 if kernel.backward else 4) * _GAP_S


def _rate(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the FLOP/s that a large matrix product reaches in the kernel's precision."""
    device = setting.device
    share = device.achieved
    if not is_half(kernel, setting.precision):
        share = device.achieved_tf32 if in_tf32(kernel, setting) else device.achieved_fp32
    return _peak(kernel, setting) * share


def _peak(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the peak FLOP/s of the data sheet in the kernel's precision."""
    device, precision = setting.device, setting.precision
    if not is_half(kernel, precision):
        return device.tf32 if in_tf32(kernel, setting) else device.fp32
    return device.fp8 if precision == "fp8" and kernel.kind == "matmul" else device.half
