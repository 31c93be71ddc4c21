"""Determines the kind, FLOPs and bytes of an operation on a GPU, for `trace.py`. Operations that
run differently on a CPU than on a GPU are replaced by their GPU form.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUSIBLE = frozenset({"pointwise", "reduction", "copy"})
Size = tuple[int, int, int, int]

_MATMUL = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear", "_grouped_mm"})
_REDUCTION = _names(
    """native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit native_group_norm native_group_norm_backward _softmax
    _softmax_backward_data _log_softmax _log_softmax_backward_data sum mean var var_mean amax
    amin max min any all norm linalg_vector_norm argmax logsumexp batch_norm_backward
    _batch_norm_with_update cumsum _fused_rms_norm _fused_rms_norm_backward prod std"""
)
_COPY = frozenset(
    {"_to_copy", "clone", "copy_", "contiguous", "cat", "stack", "constant_pad_nd", "repeat"}
)
_INDEX = _names(
    """index index_put index_put_ gather scatter scatter_ scatter_add index_add index_select topk
    sort nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"""
)
_FREE = _names(
    """empty empty_like empty_strided new_empty new_empty_strided detach _local_scalar_dense
    lift_fresh alias _reshape_alias resize_ set_ item is_same_size sym_size record_stream"""
)


# Operations that autocast runs in float32 on CUDA, but not on the CPU
# (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE).
_FLOAT32 = _names(
    """layer_norm group_norm softmax softmin log_softmax cross_entropy nll_loss mse_loss l1_loss
    smooth_l1_loss huber_loss kl_div pow rpow exp expm1 log log10 log2 log1p rsqrt reciprocal acos
    asin cosh sinh tan erfinv rms_norm renorm dist cdist pdist binary_cross_entropy_with_logits
    softplus logsumexp cosine_similarity interpolate upsample"""
)
# The same, but the kernels read half precision and compute the result in float32.
_FLOAT32_RESULT = _names("sum cumsum cumprod prod norm linalg_vector_norm")


def classify(packet: str) -> str:
    """Return "matmul", "recurrent", "conv", "attention", "reduction", "copy", "index" or
    "pointwise", or "" for an operation that runs no kernel.
    """
    name = packet.removeprefix("aten.")
    if name in _FREE:
        return ""
    if _sequence[0]:
        return "recurrent" if name in _MATMUL else ""
    if name in _MATMUL:
        return "matmul"
    if "convolution" in name or "conv2d" in name:
        return "conv"
    if "attention" in name:
        return "attention"
    if _is_pooling(name) or "embedding" in name:
        return "index"
    for kind, names in (("reduction", _REDUCTION), ("copy", _COPY), ("index", _INDEX)):
        if name in names:
            return kind
    return "pointwise"


def moved_bytes(kind: str, name: str, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> int:
    """Return the bytes that an operation reads and writes. An index look-up reads as many bytes as
    it writes, not the whole table, and a sum of embeddings all rows that it sums.
    """
    written = sum(_bytes(each) for each in outs)
    if _is_pooling(name):
        # The backward pass does not read the image, only the gradients and the indices.
        used = [each for each in ins if "backward" not in name or each.shape != outs[0].shape]
        return written + sum(map(_bytes, used))
    if name.startswith("_embedding_bag") and "backward" not in name and len(ins) > 1:
        table, rows = ins[:2]
        return written + rows.numel() * table.shape[-1] * table.itemsize
    if kind == "index":
        return written + sum(min(_bytes(each), written) for each in ins)
    return written + sum({id(each): _bytes(each) for each in ins}.values())


def _is_pooling(name: str) -> bool:
    return "pool" in name or "upsample" in name


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements in memory. An expanded dimension, which repeats one
    element, is counted once.
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    return (
        prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
        * tensor.itemsize
    )


def count_flops(
    kind: str, packet: str, args: Any, ins: list[torch.Tensor], outs: list[torch.Tensor]
) -> tuple[float, Size]:
    """Return the FLOPs (a multiply-add counts as two) and the size that `KernelProfile` describes.
    FLOPs are zero for operations that are not matrix products.
    """
    name = packet.removeprefix("aten.")
    if kind == "matmul":
        return _matmul(name, args, outs)
    if kind == "recurrent":
        flops, (_, rows, columns, depth) = _matmul(name, args, outs)
        return flops, (_sequence[0], rows // _sequence[0], columns, depth)
    if kind == "conv":
        return _conv(name, args, outs)
    if kind == "attention":
        return _attention(name, args)
    if kind in ("pointwise", "copy"):
        return 0.0, (outs[0].numel(), 0, 0, _find_order(kind, name, ins, outs[0]))
    return 0.0, _normalized(name, args)


def _find_order(kind: str, name: str, ins: list[torch.Tensor], out: torch.Tensor) -> int:
    """Return 0 if a kernel handles its elements in the order of memory, 1 if it computes the
    address of each element because operands are repeated, slices or of several types, and 2 if a
    copy changes the innermost dimension.
    """
    given = [each for each in ins if each.numel() > 1 and each.layout is torch.strided]
    if name in ("cat", "stack"):
        return int(any(not each.is_contiguous() for each in given))
    if name == "roll" or out.layout is not torch.strided:
        return 1
    if kind == "pointwise" and len({each.dtype for each in given if each.is_floating_point()}) > 1:
        return 1
    if all(each.shape == out.shape and each.stride() == out.stride() for each in given):
        return 0
    steps = {_innermost(each) for each in (*given, out) if each.shape == out.shape}
    return 2 if kind == "copy" and len(steps) > 1 else 1


def _innermost(tensor: torch.Tensor) -> int:
    """Return the dimension whose elements are next to each other in memory, or -1."""
    wide = [at for at, size in enumerate(tensor.shape) if size > 1]
    return next((at for at in wide if tensor.stride(at) == 1), -1)


def _normalized(name: str, args: Any) -> Size:
    """Return the size of a normalization, softmax or sum, or zeros for other operations: (samples,
    channels, pixels, 1 if in channels-last memory) for batch normalization, and (rows, columns, 0,
    0) for others. A sum has as many columns as results. The last number is 1 if it sums over rows,
    as for biases.
    """
    if "batch_norm" in name:
        data = args[1] if "backward" in name else args[0]
        samples, channels = data.shape[:2]
        return samples, channels, data.numel() // max(1, samples * channels), int(_is_last(data))
    if name == "sum" and args[0].dim() > 1:
        dims = {each % args[0].dim() for each in (args[1] if len(args) > 1 else ())}
        kept = prod(size for at, size in enumerate(args[0].shape) if at not in dims)
        # The columns are summed if the innermost dimension remains.
        is_kept = bool(dims) and args[0].dim() - 1 not in dims
        return args[0].numel() // max(1, kept), kept, 0, int(is_kept)
    if "softmax" in name:
        columns = args[0].shape[args[2 if "backward" in name else 1]] if args[0].dim() else 1
    elif "layer_norm" in name or "rms_norm" in name:
        columns = prod(args[2] if name == "native_layer_norm_backward" else args[1])
        columns = prod(args[2]) if name == "_fused_rms_norm_backward" else columns
    else:
        return 0, 0, 0, 0
    return args[1 if "norm_backward" in name else 0].numel() // max(1, columns), columns, 0, 0


def _matmul(name: str, args: Any, outs: list[torch.Tensor]) -> tuple[float, Size]:
    left = args[1] if name in ("addmm", "baddbmm") else args[0]
    batch = prod(outs[0].shape[:-2]) if name in ("bmm", "baddbmm", "_grouped_mm") else 1
    parts = 1
    if name == "_grouped_mm" and left.dim() == 2:
        if outs[0].dim() == 2:  # The groups share the rows of the result.
            batch = args[1].shape[0]
        else:  # In gradients of grouped weights, they share the inner length, in equal parts.
            parts = batch
    k = left.shape[-1]
    n = outs[0].shape[-1]
    m = outs[0].numel() // max(1, n * batch)
    return 2.0 * batch * m * n * k / max(1, parts), (batch, m, n, k // max(1, parts))


def _conv(name: str, args: Any, outs: list[torch.Tensor]) -> tuple[float, Size]:
    """Return the FLOPs and the shape of the matrix product that computes a convolution. The product
    has m rows for the pixels, n columns for the output channels of a group, and the inner dimension
    k. k is the number of input channels of a group, multiplied by the kernel size.
    """
    if "backward" in name:
        grad, given, weight = args[0], args[1], args[2]
        mask = args[10] if len(args) > 10 else (True, True, False)
        transposed, groups = args[7], args[9]
        passes = int(mask[0]) + int(mask[1])
        pixels = (given if transposed else grad).numel() // (given if transposed else grad).shape[1]
    else:
        given, weight = args[0], args[1]
        transposed, groups = (args[6], args[8]) if len(args) > 8 else (False, 1)
        passes = 1
        pixels = (given if transposed else outs[0]).numel() // (
            given if transposed else outs[0]
        ).shape[1]
    k = prod(weight.shape[1:])
    n = weight.shape[0]
    return 2.0 * passes * pixels * n * k, (int(groups), pixels, n // int(groups), k)


def find_window(kind: str, name: str, args: Any, outs: list[torch.Tensor]) -> tuple[int, ...]:
    """Return for a convolution: the input channels of a group, the elements of its window, the
    pixels of a result, the step between windows, 1 if its input is in channels-last memory, and the
    dilation if it exceeds 1. Returns () for other operations.
    """
    if kind != "conv":
        return ()
    backward = "backward" in name
    weight, result = (args[2], args[0]) if backward else (args[1], outs[0])
    stride = args[4] if backward else args[3] if len(args) > 3 else (1,)
    spread = max(args[6] if backward else args[5] if len(args) > 5 else (1,), default=1)
    pixels = prod(result.shape[2:])
    last = int(_is_last(args[1] if backward else args[0]))
    window = weight.shape[1], prod(weight.shape[2:]), pixels, max(stride, default=1), last
    return (*window, spread) if spread > 1 else window


def needs_conversion(window: tuple[int, ...], size: Size) -> bool:
    """Return whether a convolution copies its operands and its result to channels-last memory, as
    all dense convolutions in NCHW memory do except products of whole, aligned images.
    """
    if not window or (size[0] > 1 and size[2] <= 1):
        return False
    _, elements, pixels, stride, last = window[:5]
    return not last and not (elements == 1 and stride == 1 and pixels % 8 == 0)


def _is_last(data: torch.Tensor) -> bool:
    """Return whether an image is in channels-last memory only."""
    return (
        data.dim() == 4
        and not data.is_contiguous()
        and data.is_contiguous(memory_format=torch.channels_last)
    )


def _attention(name: str, args: Any) -> tuple[float, Size]:
    """Return the FLOPs and the shape of attention. The forward pass has two matrix products. The
    backward pass has five matrix products, because flash attention recomputes one of them (Dao
    2022).
    """
    backward = "backward" in name
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    heads, m, n, k = prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
    causal = any(each is True for each in args[3:] if isinstance(each, bool)) and m == n
    return (5 if backward else 2) * 2.0 * heads * m * n * k * (0.5 if causal else 1.0), (
        heads,
        m,
        n,
        k,
    )


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


class GpuSemantics(TorchFunctionMode):
    """Replaces operations that run differently on a CPU than on a GPU: the operations on autocast's
    float32 list, dropout, attention with dropout, and recurrent networks.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if func in _MOVES:
            return _move(_MOVES[func], *args, **(kwargs or {}))
        args, kwargs = _on_cpu(name, args, dict(kwargs or {}))
        if name == "scaled_dot_product_attention":
            if _stores_scores(*args, **kwargs):
                return _attend(*args, **kwargs)
            kwargs["dropout_p"] = 0.0
            args = args[:4]
        elif func is F.multi_head_attention_forward and "training" in kwargs:
            kwargs["training"] = (
                # Dropout inside attention is skipped, because it cannot be replaced. Fused
                # attention stores no mask.
                False
            )
        elif func is F.dropout:
            return _dropout(*args, **kwargs)
        elif name in _RECURRENT and len(args) > 7:
            return _recurrent(name, *args)
        elif name == "rms_norm":
            return _rms_norm(*args, **kwargs)
        elif func is torch.Tensor.pin_memory:
            return args[0]
        elif name == "cross_entropy" and torch.is_autocast_enabled("cpu") and _is_narrow(args[0]):
            return _cross_entropy(*args, **kwargs)
        elif torch.is_autocast_enabled("cpu"):
            args, kwargs = _as_autocast(name, args, kwargs)
        return func(*args, **kwargs)


def _as_autocast(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operation as autocast changes them on CUDA."""
    if name in _FLOAT32_RESULT and args and _is_narrow(args[0]):
        return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
    # The interpolation "area" is a pooling, which stays in half precision.
    if name in _FLOAT32 and kwargs.get("mode") != "area":
        args = tuple(_widen(each) for each in args)
        kwargs = {key: _widen(value) for key, value in kwargs.items()}
    return args, kwargs


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Apply `GpuSemantics`, also during the backward pass. Torch turns this mode off in the
    backward pass, where activation checkpointing recomputes operations of the forward pass.
    """
    engine = torch.autograd.__dict__["_engine_run_backward"]

    def run(*args: Any, **kwargs: Any) -> Any:
        with GpuSemantics():
            return engine(*args, **kwargs)

    torch.autograd.__dict__["_engine_run_backward"] = run
    try:
        with GpuSemantics():
            yield
    finally:
        torch.autograd.__dict__["_engine_run_backward"] = engine


def _recurrent(
    name: str, data: torch.Tensor, second: Any, third: Any, *options: Any
) -> tuple[torch.Tensor, ...]:
    """Replace a recurrent network with a few kernels, as cuDNN does. Together, the kernels have the
    FLOPs and the saved tensors of all time steps. For a packed sequence, the arguments after `name`
    are data, batch sizes and state; for other data, they are data and state.
    """
    packed = isinstance(options[0], list | tuple)
    state, weights, both = (
        (third, options[0], options[5]) if packed else (second, third, options[4])
    )
    states = state if name == "lstm" else [state]
    first = states[0]
    # for each layer and direction: two matrices and the biases
    per = len(weights) // first.shape[0]
    out, width, directions = data, first.shape[-1], 2 if both else 1
    last = []  # of each layer and direction, computed as the states of the first rows
    steps = second.shape[0] if packed else data.numel() // data.shape[-1] // first.shape[1]
    for layer in range(0, len(weights), per * directions):
        ways = []
        for way in range(layer, layer + per * directions, per):
            kept = _run_direction(out, weights[way : way + per], width, steps)
            ways.append(kept[..., :width])
            last.append(kept.reshape(-1, kept.shape[-1])[: first.shape[1]])
        out = torch.cat(ways, -1) if directions == 2 else ways[0]
    return out, *(torch.stack([row[:, : each.shape[-1]] for row in last]) for each in states)


def _run_direction(data: torch.Tensor, weights: Any, width: int, steps: int) -> torch.Tensor:
    bias = weights[2] + weights[3] if len(weights) > 3 else None
    gates = F.linear(data, weights[0], bias)
    weight = weights[1].to(gates.dtype)
    # torch declares it without types
    out: torch.Tensor = _Cells.apply(gates, weight, width, steps)  # type: ignore[no-untyped-call]
    return out


class _Cells(torch.autograd.Function):
    """Computes one direction of a recurrent layer from the product of its input. The forward pass
    and the gradients of the states multiply one time step after the other. Saved are the tensors
    that cuDNN keeps: the gates, the state and the cell's state of each time step.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, weight: torch.Tensor, width: int, steps: int
    ) -> torch.Tensor:
        with in_sequence(steps):
            state = gates[..., :width].clone()
            kept = (gates + F.linear(state, weight)).tanh_()
            out, cell = state.clone(), state.clone()
        ctx.save_for_backward(state, kept, weight, cell)
        ctx.steps = steps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        state, kept, weight, _ = ctx.saved_tensors
        with in_sequence(ctx.steps):
            grad = kept.clone()
            grad @ weight
        return grad, grad.flatten(0, -2).t() @ state.flatten(0, -2), None, None


# The number of time steps of the recurrent layer whose product runs now, or 0.
_sequence = [0]


@contextmanager
def in_sequence(steps: int) -> Iterator[None]:
    """Record the matrix products in this context as `steps` products, each of which waits for the
    product before it, and no other kernels: each time step contains them.
    """
    _sequence[0] = steps
    try:
        yield
    finally:
        _sequence[0] = 0


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Normalize with one kernel, as on CUDA. The kernel for layer normalization stands for it,
    because it moves the same bytes.
    """
    if torch.is_autocast_enabled("cpu"):
        input, weight = _widen(input), _widen(weight)
    return F.layer_norm(input, normalized_shape, weight, None, eps or 1e-5)


def _on_cpu(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operation with each device replaced by the CPU. Fake tensors on a
    device other than the CPU need a build of torch for that device.
    """
    if name == "parse_to":  # `Module.to`, whose integer arguments are numbers of devices
        args = tuple("cuda" if type(each) is int else each for each in args)
        return args, {key: "cuda" if type(each) is int else each for key, each in kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    if name == "type":  # `Tensor.type`, whose type may be a text
        args = tuple(
            each.replace("torch.cuda.", "torch.") if type(each) is str else each for each in args
        )
    return args, kwargs


_MOVES = {torch.Tensor.to: "", torch.Tensor.cuda: "cuda", torch.Tensor.cpu: "cpu"}


def _move(place: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Act like `Tensor.to`, but only record the device: all fake tensors are on one device. The
    host's copy of a tensor that the script moved to the GPU is a new tensor.
    """
    if args and isinstance(args[0], torch.Tensor):
        return tensor.type(args[0].dtype)
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.dtype):
            tensor = tensor if each is tensor.dtype else tensor.type(each)
        elif isinstance(each, str | torch.device):
            place = torch.device(each).type
        elif type(each) is int:
            place = "cuda"
        elif isinstance(each, torch.memory_format) and each is not torch.preserve_format:
            tensor = tensor.contiguous(memory_format=each)
    try:
        before: Any = tensor.untyped_storage()
    except RuntimeError:  # Sparse tensors and tensors of `vmap` have no storage.
        return tensor
    if place == "cpu" and find_place(before) == "cuda":
        tensor = tensor.clone()
    if place:
        storage: Any = tensor.untyped_storage()
        storage.place = place
    return tensor


def find_place(storage: Any) -> str:
    """Return the kind of the device to which a script moved a storage, or "" if the script named no
    device.
    """
    return getattr(storage, "place", "")


def _widen(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Compute the cross entropy as on CUDA: autocast leaves log-softmax in half precision, because
    `cross_entropy` states the type, and converts its result for the loss to float32
    (aten/src/ATen/autocast_mode.h, fp32_set_opt_dtype and fp32).
    """
    kwargs.pop("label_smoothing", None)
    narrow = torch.ops.aten._log_softmax(input, 1, False)
    return F.nll_loss(narrow.float(), target, *args[:5], **kwargs)


def _stores_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> bool:
    """Return whether attention runs as single kernels, of which dropout is one: those of a mask
    with a gradient, such as a learned bias of positions.
    """
    return attn_mask is not None and attn_mask.requires_grad and dropout_p > 0


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    dropout_p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention with a mask that has a gradient, in float32 and with all scores in memory
    (`_scaled_dot_product_attention_math` in aten/src/ATen/native/transformers/attention.cpp). A
    mask excludes `is_causal`.
    """
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(times, -3) for each in (key, value))
    narrow = torch.get_autocast_dtype("cpu")
    autocast = torch.is_autocast_enabled("cpu")
    given = [query, key, value, attn_mask]
    if autocast:
        given = [each.to(narrow) for each in given]
    with torch.autocast("cpu", enabled=False):
        q, k, v, mask = (_widen(each) for each in given)
        root = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
        scores = (q * root) @ (k * root).transpose(-2, -1) + mask
        out: torch.Tensor = _dropout(torch.softmax(scores, -1), dropout_p) @ v
        return out.to(narrow if autocast else query.dtype)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
