"""The state of objects that a script adds to checkpoints with `run.keep`.

The tensors of these objects are saved together with the model's tensors. The rest of an object's
state is called its plain data and is stored as encoded text. In the plain data, only the shape of
each tensor is stored, without its values.
"""

import base64
import io
import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Objects = dict[str, Any]


def encode(objects: Objects) -> tuple[dict[str, str], Objects]:
    """Return the plain data and the tensors of all objects, by name. The tensors are copies,
    because the script may change the objects during the save.

    Raises: TypeError: a state contains a value that checkpoints cannot store.
    """
    plain, tensors = {}, {}
    for name, thing in objects.items():
        state = thing.state_dict()
        plain[name] = _encode(name, tree_map(_without_values, state))
        copies = {
            str(n): _copy(leaf)
            for n, leaf in enumerate(tree_leaves(state))
            if isinstance(leaf, torch.Tensor)
        }
        if copies:
            tensors[name] = copies
    return plain, tensors


def make_targets(plain: dict[str, Any], objects: Objects) -> Objects:
    """Return empty tensors into which the saved tensors are loaded. The empty tensors are on the
    same devices as the tensors of the script's objects.
    """
    targets = {}
    for name, thing in objects.items():
        leaves = tree_leaves(_decode(plain.get(name)))
        live = tree_leaves(thing.state_dict())
        live += [None] * len(leaves)
        found = {
            str(n): _like(leaf, live[n])
            for n, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        if found:
            targets[name] = found
    return targets


def decode(plain: dict[str, Any], tensors: Objects) -> Objects:
    """Combine the plain data with the loaded tensors, and return each object's state by name."""
    states = {}
    for name, text in plain.items():
        state, values = _decode(text), tensors.get(name, {})
        numbers = iter(range(len(tree_leaves(state))))
        states[name] = tree_map(lambda leaf, n=numbers, v=values: v.get(str(next(n)), leaf), state)
    return states


def _encode(name: str, state: Any) -> str:
    try:
        return base64.b64encode(_dump(state)).decode()
    except pickle.PickleError as error:
        odd = next((type(leaf).__name__ for leaf in tree_leaves(state) if _fails(leaf)), "object")
        raise TypeError(
            f"run.keep({name!r}): the object's state_dict contains a {odd}; a checkpoint can hold "
            "only tensors, numbers, strings, lists and dicts"
        ) from error


def _dump(state: Any) -> bytes:
    """Encode a state, and check that the encoded state can be decoded without running code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def _fails(leaf: Any) -> bool:
    try:
        return not _dump(leaf)
    except pickle.PickleError:
        return True


def _decode(text: Any) -> Any:
    if not isinstance(text, str):
        return text  # A checkpoint of an earlier version has plain JSON here.
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _copy(tensor: Any) -> Any:
    """Return a copy of a tensor in CPU memory. A copy of a split tensor stays on its device."""
    if hasattr(tensor, "device_mesh"):
        return tensor.detach().clone()
    return tensor.detach().to("cpu", copy=True)


def _like(saved: Any, live: Any) -> Any:
    if isinstance(live, torch.Tensor) and live.shape == saved.shape:
        return torch.empty_like(live, requires_grad=False)
    return torch.empty(saved.shape, dtype=saved.dtype)
