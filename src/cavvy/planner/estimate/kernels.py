"""Estimates the time of one kernel on a device. The kernel's arithmetic operations run at a rate
that depends on the kernel's kind and shape. Its memory traffic runs at a share of the memory
bandwidth, which depends on the kind.
"""

from math import ceil

from cavvy.domain.values import Struct
from cavvy.planner.device_rates import DeviceRates
from cavvy.planner.estimate.profile import KernelProfile, StepSettings


class KernelConstants(Struct, frozen=True, kw_only=True):
    """The calibrated constants of kernels."""

    # The rates of large matrix products, as shares of the best measured rate of any shape
    # (`DeviceRates.achieved`)
    half: float = 0.8447
    tf32: float = 0.4826
    fp32: float = 0.93
    # Half-precision products with inner length k reach k / (k + depth) of the rate. For a slower
    # precision, `depth` is multiplied by (its peak / the half-precision peak).
    depth: float = 405

    # rates as shares of the rate of large matrix products
    conv: float = 0.8138  # convolutions in half precision
    wide_conv: float = 0.71  # convolutions in tf32 and fp32
    conv_depth: float = 102.6  # the same as `depth`, but for convolutions
    # Convolutions with n results per pixel reach n / (n + conv_columns) of their rate.
    conv_columns: float = 36.38
    grouped_conv: float = 0.2977
    # the matrix products of fused attention in half precision on an H200, forward and backward
    attention: float = 0.6154
    attention_backward: float = 0.543
    wide_attention: float = 0.6765  # attention in tf32 and fp32
    # convolutions with one channel per group, as a share of the fp32 peak
    depthwise_rate: float = 0.1455

    # Real bandwidths grow more slowly than those of the data sheets: with the power (1 -
    # bandwidth_falloff).
    bandwidth_falloff: float = 0.187
    # shares of the bandwidth
    # reading operands and writing results of products, dense convolutions and attention
    operands: float = 0.5014
    depthwise: float = 0.3277
    pointwise: float = 0.5188
    copy: float = 0.5194
    batch_norm: float = 0.4395
    group_norm: float = 0.3206
    layer_norm: float = 0.4752
    softmax: float = 0.501
    pooling: float = 0.4027  # also interpolation
    look_up: float = 0.3839  # embeddings, indexing and scatter operations
    reduction: float = 0.4568  # sums, means, maxima and scans (cumulative sums)
    # A half-precision convolution whose memory format is not channels-last moves its bytes this
    # many more times, at the full bandwidth.
    layout: float = 8.424


class KernelSetting(Struct, frozen=True, kw_only=True):
    """The conditions under which a kernel runs: the device, the step's settings, the precision, and
    the batch as a multiple of the profile's batch.
    """

    device: DeviceRates
    run: StepSettings
    precision: str
    scale: float
    constants: KernelConstants


PRODUCTS = frozenset({"matmul", "conv", "attention"})  # kinds whose time is limited by arithmetic

# Slower devices come closer to the FLOP/s of their data sheets. Real rates grow with the power 1 -
# _FALLOFF = 0.9 of the data sheet's rates. In the three tables of docs/reference/estimate.md, the
# exponents of arithmetic and bandwidth add up to about 0.9.
_FALLOFF = 0.1
_H200_FLOPS, _H200_BANDWIDTH = 989.4e12, 4.8e12  # the device on which the constants were measured

# Seconds from the end of one kernel to the start of the next on a busy device (assumed from the
# times that profilers show for CUDA streams).
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
    moved = kernel.fused_bytes if setting.run.compile else kernel.bytes
    fixed = min(kernel.fixed_bytes, moved)
    moved = (moved - fixed) * setting.scale + fixed
    kind = name_kind(kernel)
    seconds = moved / (
        bandwidth_of(setting.device, setting.constants) * _share(kind, setting.constants)
    )
    if kernel.kind in PRODUCTS:
        arithmetic = _arithmetic(kernel, kind, setting)
        seconds = (arithmetic**_OVERLAP + seconds**_OVERLAP) ** (1 / _OVERLAP)
    elif setting.run.compile:
        return seconds  # The compiler fuses many kernels into a few.
    return seconds + _extra(kernel, moved, setting) + _GAP_S


def bandwidth_of(device: DeviceRates, constants: KernelConstants) -> float:
    """Return the bandwidth in bytes per second. `constants` contains the shares of this bandwidth
    that kernels reach.
    """
    ratio = _H200_BANDWIDTH / device.bandwidth
    return float(device.bandwidth * ratio**constants.bandwidth_falloff)


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


def _share(kind: str, constants: KernelConstants) -> float:
    if kind in ("matmul", "conv", "grouped_conv", "attention"):
        return constants.operands
    share: float = getattr(constants, kind, constants.pointwise)
    return share


def _arithmetic(kernel: KernelProfile, kind: str, setting: KernelSetting) -> float:
    """Return the seconds that the arithmetic of a kernel takes."""
    constants, wide = setting.constants, not _is_half(kernel, setting.precision)
    groups, rows, columns, depth = _shape(kernel, setting.scale)
    rate = _rate(kernel, setting)
    flops = kernel.flops * setting.scale
    if kind == "attention":
        return flops / (rate * constants.wide_attention) if wide else _attention(kernel, setting)
    if kind == "depthwise":
        return flops / (setting.device.fp32 * constants.depthwise_rate)
    if kind == "grouped_conv":
        return flops / (rate * constants.grouped_conv)
    slower = _peak(kernel, setting) / setting.device.half
    if kind == "conv":
        rate *= constants.wide_conv if wide else constants.conv
        rate *= depth / (depth + constants.conv_depth * slower)
        rate *= columns / (columns + constants.conv_columns)
        return flops * _padded(columns, _PAD_CONV) * _padded(depth, _PAD_CONV) / rate
    pad = _PAD_WIDE if wide else _PAD_HALF
    tiles = groups * ceil(rows / _TILE) * ceil(columns / _TILE) * max(1.0, depth / _SPLIT)
    busy = min(1.0, max(0.02, tiles / _PROCESSORS))
    # Padding is multiplied like data. The fixed cost of a result, which `depth` states as an inner
    # length, occurs only for the results that are written.
    work = _padded(rows, pad) * _padded(columns, pad) * _padded(depth, _PAD_DEPTH)
    work += constants.depth * slower / depth
    return flops * work / (rate * busy)


def _attention(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the seconds of fused attention in half precision: its matrix products, and the softmax
    of its scores. Each row of queries costs additional time. The formula adds a number of keys to
    each row to represent this time.
    """
    constants, device = setting.constants, setting.device
    heads, queries, keys, width = (max(1, each) for each in kernel.size)
    products = 5 if kernel.backward else 2
    flops = kernel.flops * setting.scale
    whole = products * 2.0 * heads * queries * keys * width * setting.scale
    share = constants.attention_backward if kernel.backward else constants.attention
    share = min(1.0, share * (_H200_FLOPS / device.half) ** _ATTENTION_FALLOFF)
    more = _MORE_KEYS_BACKWARD if kernel.backward else _MORE_KEYS
    if flops < 0.75 * whole:
        more += _MORE_KEYS_CAUSAL
    scores = flops / (products * 2.0 * width)
    softmax = _SOFTMAX_BACKWARD if kernel.backward else _SOFTMAX
    seconds = flops / (_rate(kernel, setting) * share) + scores * softmax / device.fp32
    return float(seconds * (1 + more / keys))


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
    attention.
    """
    constants = setting.constants
    bandwidth = bandwidth_of(setting.device, constants)
    is_half = _is_half(kernel, setting.precision)
    dense = kernel.kind == "conv" and name_kind(kernel) != "depthwise"
    if dense and is_half and not setting.run.channels_last:
        return constants.layout * moved / bandwidth
    if kernel.kind == "attention" and setting.run.math_attention:
        heads, queries, keys, _ = kernel.size
        # Scores, mask, softmax and product are each written to memory and read back.
        passes = 10 if kernel.backward else 8
        scores = heads * queries * keys * setting.scale * (4 if kernel.wide else 2)
        return passes * scores / (bandwidth * constants.softmax)
    return 0.0


def _is_half(kernel: KernelProfile, precision: str) -> bool:
    return not kernel.wide and precision in ("bf16", "fp16", "fp8")


def _rate(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the FLOP/s that a large matrix product reaches in the kernel's precision."""
    device, constants = setting.device, setting.constants
    share = constants.half
    if not _is_half(kernel, setting.precision):
        share = constants.tf32 if setting.precision == "tf32" else constants.fp32
        if device.tf32 == device.fp32:
            share = constants.fp32
    rate = _peak(kernel, setting) * share * device.achieved
    return float(rate * (_H200_FLOPS / device.half) ** _FALLOFF)


def _peak(kernel: KernelProfile, setting: KernelSetting) -> float:
    """Return the peak FLOP/s of the data sheet in the kernel's precision."""
    device, precision = setting.device, setting.precision
    if not _is_half(kernel, precision):
        return device.tf32 if precision == "tf32" else device.fp32
    return device.fp8 if precision == "fp8" and kernel.kind == "matmul" else device.half
