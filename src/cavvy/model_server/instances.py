"""Instances and predictions: the prediction API of TensorFlow Serving in its row format, which is
version 1 of KServe's protocol.

An instance contains one row of values for each input of the model. If the model has one input, the
instance is the row itself; otherwise the instance is an object that maps the inputs' names to rows.
A prediction is one row of each output, in the same form as an instance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .inference import TYPES, WrongRequest

if TYPE_CHECKING:
    from .inference import OnnxModel


def predict(model: OnnxModel, body: Any) -> list[Any]:
    """Return a prediction for each instance of a request's body. Only instances of the same shape
    are computed together, so that instances of different shapes do not affect each other. Raises
    WrongRequest.
    """
    if not isinstance(body, dict) or not isinstance(body.get("instances"), list):
        raise WrongRequest("the body needs a list `instances`")
    together = _joins(model)
    groups: dict[Any, list[int]] = {}
    rows = []
    for index, instance in enumerate(body["instances"]):
        try:
            row = _read_instance(model, instance)
        except WrongRequest as error:
            raise WrongRequest(f"instances[{index}]: {error}") from error
        rows.append(row)
        shapes = tuple(value.shape for value in row.values())
        groups.setdefault(shapes if together else index, []).append(index)
    predictions: list[Any] = [None] * len(rows)
    for members in groups.values():
        feeds = {name: np.stack([rows[index][name] for index in members]) for name in model.inputs}
        found = _run(model, feeds, len(members))
        for index, prediction in zip(members, found):  # noqa: B905 - Python 3.8 runs this too
            predictions[index] = prediction
    return predictions


def _joins(model: OnnxModel) -> bool:
    """Return whether the model computes several instances together, each independent of the others.
    Raises WrongRequest if an input has no axis of instances.
    """
    for name, known in model.inputs.items():
        first = known.shape[0] if known.shape else 0
        if isinstance(first, int) and first not in (-1, 1):
            raise WrongRequest(
                f"the input {name} has the shape {known.shape}, without an axis for instances; "
                f"post to /infer instead"
            )
    fixed = any(known.shape[0] == 1 for known in model.inputs.values())
    return not (fixed or model.mixes)


def _read_instance(model: OnnxModel, instance: Any) -> dict[str, Any]:
    if not isinstance(instance, dict):
        if len(model.inputs) > 1:
            raise WrongRequest(f"an object with the inputs {', '.join(model.inputs)} is needed")
        instance = dict.fromkeys(model.inputs, instance)
    for name in instance:
        if name not in model.inputs:
            raise WrongRequest(f"there is no input {name!r}; expected {', '.join(model.inputs)}")
    missing = [name for name in model.inputs if name not in instance]
    if missing:
        raise WrongRequest(f"the model also needs the inputs {', '.join(missing)}")
    return {name: _read_value(name, known, instance[name]) for name, known in model.inputs.items()}


def _read_value(name: str, known: Any, value: Any) -> Any:
    if known.type not in TYPES:
        raise WrongRequest(f"the input {name} is a {known.type}, which a request cannot contain")
    kind, dtype = TYPES[known.type]
    try:
        found = np.asarray(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongRequest(f"the input {name}, which is {kind}: {error}") from error
    wanted = known.shape[1:]
    fits = len(wanted) == found.ndim and all(
        not isinstance(axis, int) or axis in (-1, size)
        for axis, size in zip(wanted, found.shape)  # noqa: B905 - Python 3.8 runs this too
    )
    if not fits:
        raise WrongRequest(f"the input {name} has the shape {list(found.shape)}; expected {wanted}")
    return found


def _run(model: OnnxModel, feeds: dict[str, Any], count: int) -> list[Any]:
    """Return the predictions for `count` stacked instances. Raises WrongRequest."""
    names = list(model.outputs)
    columns = []
    for name, value in zip(names, model.run(feeds, names)):  # noqa: B905 - as above
        # an output that is not a tensor, as the probabilities of scikit-learn's models, is a list
        column = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(column, list) or len(column) != count:
            raise WrongRequest(
                f"the output {name} has no row for each instance; post to /infer instead"
            )
        columns.append(column)
    if len(columns) == 1:
        return columns[0]
    return [dict(zip(names, row)) for row in zip(*columns)]  # noqa: B905 - as above
