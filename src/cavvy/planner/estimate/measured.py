"""Corrects estimated kernel times by the times of kernels that `cavvy bench --kernels` measured on
one device. A device profile is JSON data; `read_device` reads it.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import exp, log, log2
from typing import Any

from cavvy.domain.values import Struct
from cavvy.planner.device_rates import DeviceRates, device_of, has_half_lanes
from cavvy.planner.estimate.kernels import (
    PRODUCTS,
    KernelSetting,
    align,
    in_fp32,
    in_tf32,
    is_causal,
    is_half,
    is_last,
    kernel_time,
    moved_bytes,
    name_kind,
)
from cavvy.planner.estimate.profile import KernelProfile, StepSettings

FORMAT = "cavvy-device-profile/1"

# Kernels whose rows are left out, because a trace contains their parts, or because constants of the
# formulas state them.
_PARTS = frozenset({"recurrent", "optimizer"})
# Measured kernels whose names differ from those of a trace, and the last number of their size
_NAMES = {
    "sum_rows": ("sum", 1),
    "add_bias": ("add", 1),
    "transpose": ("clone", 1),
    "contiguous": ("clone", 2),
}
# squared distances between kernels with different names, for the kinds whose kernels differ most
_NAMED = {"reduction": 6.0, "softmax": 3.0, "pooling": 6.0, "look_up": 4.0, "pointwise": 0.2}
FARTHEST = 3.0  # the distance beyond which a measured kernel says nothing of another
_MOST = 1e18  # the numbers of a row are less
_FARTHEST_RATIO = log(1e5)  # measured times differ less from their estimates
_LITTLE = 0.15  # weight of the average of a kind against that of one kernel at no distance


class MeasuredKernel(Struct, frozen=True, kw_only=True):
    """A measured kernel: its kind, its place in the space of shapes, and the natural logarithm of
    the measured time divided by the estimated time.
    """

    kind: str
    name: str
    place: tuple[float, ...]
    ratio: float


class DeviceProfile(Struct, frozen=True, kw_only=True):
    """The kernels measured on one device."""

    device: DeviceRates
    kernels: Mapping[str, tuple[MeasuredKernel, ...]]  # by kind

    def correct(self, kernel: KernelProfile, setting: KernelSetting) -> tuple[float, float]:
        """Return the factor by which the time of a kernel differs from its estimate, and how far
        the nearest measured kernel is: 0 for the same shape, at most 3. Products in fp32 on other
        processors say nothing.
        """
        if has_half_lanes(setting.device) != has_half_lanes(self.device) and in_fp32(
            kernel, setting
        ):
            return 1.0, FARTHEST
        return _correct(
            self.kernels.get(name_kind(kernel), ()),
            plain_name(kernel.name),
            find_place(kernel, setting),
        )


@lru_cache(maxsize=1 << 16)
def _correct(
    known: tuple[MeasuredKernel, ...], name: str, place: tuple[float, ...]
) -> tuple[float, float]:
    if not known:
        return 1.0, FARTHEST
    total = weights = even = count = 0.0
    nearest = FARTHEST**2
    for each in known:
        far = sum((a - b) ** 2 for a, b in zip(each.place, place, strict=True))
        if each.name != name:
            far += _NAMED.get(each.kind, 0.0)
        nearest = min(nearest, far)
        weight = exp(-far)
        total += weight * each.ratio
        weights += weight
        share = exp(-far / 9)  # the average also prefers similar kernels
        even += share * each.ratio
        count += share
    return exp((total + _LITTLE * even / count) / (weights + _LITTLE)), nearest**0.5


def plain_name(name: str) -> str:
    """Return the name of an operation without the mark of in-place operations."""
    return name.removesuffix("_")


def find_place(kernel: KernelProfile, setting: KernelSetting) -> tuple[float, ...]:
    """Return the coordinates of a kernel among those of its kind. Kernels at a distance of 1 are
    about as fast as each other.
    """
    kind, scale = name_kind(kernel), setting.scale
    half = is_half(kernel, setting.precision)
    precision = {"tf32": 1.5, "fp32": 3.0}.get(setting.precision, 0.0)
    if kernel.kind in PRODUCTS:
        precision = 1.5 if in_tf32(kernel, setting) else 3.0
    other = (0.0 if half else precision, 1.5 if kernel.backward else 0.0)
    first, second, third, fourth = (log2(max(1, each)) for each in kernel.size)
    if kind == "matmul":
        batch = log2(max(1.0, scale))
        if kernel.fixed_result:
            sizes = first, second, third, fourth + batch
        elif first and not kernel.fixed_bytes:
            sizes = first + batch, second, third, fourth
        else:
            sizes = first, second + batch, third, fourth
        # Larger sizes change little.
        near = [0.4 * min(each, 13.0) for each in sizes]
        near[0] *= 0.3
        return (*near, 6 * align(kernel, setting), 0.7 * kernel.fixed_result, *other[:1])
    if kind in ("conv", "grouped_conv", "depthwise"):
        last = 1.5 if is_last(kernel, setting) else 0.0
        kept = 0.7 if setting.precision == "fp16" and kind == "depthwise" else 0.0
        window = kernel.window or (0, 9, 64, 1, 0)
        few = 2.0 if kind == "conv" and window[0] % 8 else 0.0
        near = [
            0.25 * (second + log2(scale)),
            0.4 * third,
            0.4 * fourth,
            0.4 * log2(window[1] or 1),
        ]
        spread = log2(max(1, window[5])) if len(window) > 5 else 0.0
        return (*near, last, 2 * kept, few, 0.5 * window[3], spread, *other)
    if kind == "attention":
        causal = 0.7 if is_causal(kernel) else 0.0
        return (0.15 * (first + log2(scale)), 0.4 * second, 0.4 * third, fourth, causal, *other)
    mib = 0.25 * log2(max(1.0, moved_bytes(kernel, setting)) / 2**20)
    is_image = kind in ("batch_norm", "pooling", "group_norm")
    last = 1.5 if is_image and is_last(kernel, setting) else 0.0
    wide = 1.0 if kernel.wide else 0.0
    if kind in ("pointwise", "copy"):
        irregular = 3.0 * kernel.size[3]
        return (mib, 0.5 * wide, irregular)
    if kind == "batch_norm":
        by_cudnn = 3.0 if setting.precision == "fp16" and half else 0.0
        return (mib, 0.3 * second, last, 2 * wide, by_cudnn, *other)
    return (mib, 0.4 * second, 0.0 if is_image else 3.0 * kernel.size[3], wide, last)


def read_device(data: Mapping[str, Any]) -> DeviceProfile | None:
    """Read a device profile from JSON data. Returns None if the catalog does not contain the
    accelerator. Raises KeyError, TypeError or ValueError if the data is not a device profile.
    """
    if data["format"] != FORMAT:
        raise ValueError(f"not a device profile: its `format` is not {FORMAT!r}")
    device = device_of(str(data["accelerator"] or data["device"]))
    if device is None:
        return None
    found: dict[str, list[MeasuredKernel]] = {}
    for row in map(check_row, data["kernels"]):
        if not row.get("us") or row["kind"] in _PARTS or "cross_entropy" in row["name"]:
            continue
        kernel, setting = read_row(row, device)
        ratio = log(row["us"] * 1e-6 / kernel_time(kernel, setting))
        if abs(ratio) > _FARTHEST_RATIO:
            raise ValueError(f"{row['name']:.40}: {row['us']:g} us cannot have been measured")
        made = MeasuredKernel(
            kind=name_kind(kernel),
            name=plain_name(kernel.name),
            place=find_place(kernel, setting),
            ratio=ratio,
        )
        found.setdefault(made.kind, []).append(made)
    kernels = {kind: tuple(each) for kind, each in found.items()}
    return DeviceProfile(device=device, kernels=kernels)


def check_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row of a device profile. Raises KeyError, TypeError, ValueError if it has no name
    or a number that cannot have been measured.
    """
    if not all(isinstance(row[key], str) for key in ("name", "kind", "precision")):
        raise TypeError("the name, kind or precision of a kernel is no text")
    numbers = [row["flops"], row["bytes"], row.get("us") or 0, *row["shape"], *row["size"]]
    if not all(0 <= each < _MOST for each in numbers):
        raise ValueError(f"{row['name']:.40}: a number is negative or too large")
    return row


def read_row(row: Mapping[str, Any], device: DeviceRates) -> tuple[KernelProfile, KernelSetting]:
    """Return the kernel of a row of a device profile, and the conditions under which it ran."""
    name, irregular = _NAMES.get(row["name"], (row["name"], 0))
    size, shape = tuple(row["size"]), row["shape"]
    window: tuple[int, ...] = ()
    if row["kind"] == "conv":
        inputs, kernel, stride, groups = shape[1], shape[5], shape[6], shape[7]
        pixels = size[1] // shape[0]
        window = (inputs // groups, kernel * kernel, pixels, stride, 0, *shape[8:9])
    elif row["kind"] in ("pointwise", "copy"):
        elements = 1
        for each in shape:
            elements *= each
        size = (elements, 0, 0, irregular)
    elif row["kind"] == "reduction" and len(shape) == 4:
        size = (shape[0], shape[1], shape[2] * shape[3], 0)
    elif row["kind"] == "reduction":
        size = (shape[0], shape[1], 0, irregular)
    made = KernelProfile(
        kind=row["kind"],
        wide=bool(row["wide"]),
        backward=bool(row["backward"]),
        flops=float(row["flops"]),
        bytes=float(row["bytes"]),
        fixed_bytes=1.0 if row["kind"] == "matmul" and size[0] == 1 else 0.0,
        fused_bytes=float(row["bytes"]),
        size=size,
        count=1,
        fixed_result=row.get("layout") == "tn",
        name=name,
        window=window,
    )
    run = StepSettings(channels_last=row.get("layout") == "nhwc")
    return made, KernelSetting(
        device=device,
        run=run,
        precision=row["precision"],
        scale=1.0,
    )
