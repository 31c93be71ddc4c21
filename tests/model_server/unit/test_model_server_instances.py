"""Our server of ONNX models answers instances with predictions, whatever they are sent with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save
from tests.model_server.unit.test_model_server import WIDTH, ask, url, write_model

from cavvy.model_server.http_server import predict
from cavvy.model_server.inference import OnnxModel, WrongRequest
from cavvy.model_server.optimise import convert

__all__ = ["url"]  # the fixture
PATH = "v1/models/tiny:predict"


def write_graph(folder: Path, nodes: list[Any], inputs: dict[str, Any], outputs: Any) -> Path:
    def describe(shapes: dict[str, Any]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in shapes.items()
        ]

    graph = helper.make_graph(nodes, "graph", describe(inputs), describe(outputs))
    opset = helper.make_opsetid("", 17)
    save(helper.make_model(graph, opset_imports=[opset], ir_version=9), str(folder / "m.onnx"))
    return folder / "m.onnx"


def make_rows(count: int) -> list[list[float]]:
    rows: list[list[float]] = np.random.default_rng(2).standard_normal((count, WIDTH)).tolist()
    return rows


def test_instances_together_are_answered_like_each_alone(url: str) -> None:
    assert json.loads(ask(f"{url}/v1/models/tiny")[1]) == {"name": "tiny", "ready": True}
    rows = make_rows(9)
    status, body = ask(f"{url}/{PATH}", {"instances": rows, "signature_name": "serving_default"})
    found = json.loads(body)["predictions"]
    assert (status, len(found), len(found[0])) == (200, 9, 10)
    for row, prediction in zip(rows, found, strict=True):
        alone = json.loads(ask(f"{url}/{PATH}", {"instances": [{"x": row}]})[1])["predictions"]
        assert alone[0] == pytest.approx(prediction, rel=1e-5, abs=1e-5)
    assert 'outcome="success"} 10' in ask(f"{url}/metrics")[1].decode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the request is not JSON: Expecting"),
        ({"inputs": [1]}, "a list `instances`"),
        ({"instances": 1}, "a list `instances`"),
        ({"instances": [[0.5] * WIDTH, [0.5]]}, "instances[1]: the input x has the shape [1]"),
        ({"instances": [["a"] * WIDTH]}, "instances[0]: the input x, which is FP32: could not"),
        ({"instances": [[[1], [1, 2]]]}, "inhomogeneous"),
        ({"instances": [{"y": 1}]}, "there is no input 'y'; expected x"),
        ({"instances": [{}]}, "also needs the inputs x"),
    ],
)
def test_a_wrong_instance_is_named(url: str, body: Any, said: str) -> None:
    status, answer = ask(f"{url}/{PATH}", body)
    assert (status, said in json.loads(answer)["error"]) == (400, True), answer
    assert ask(f"{url}/v1/models/other:predict", {"instances": []})[0] == 404


def test_several_inputs_and_outputs_have_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Neg", ["a"], ["neg"])]
    shape = ["n", 2]
    path = write_graph(
        tmp_path, nodes, {"a": shape, "b": shape}, dict.fromkeys(("sum", "neg"), shape)
    )
    model = OnnxModel(path, 1)
    instances = [{"a": [1, 2], "b": [3, 4]}, {"b": [0, 0], "a": [5, 6]}]
    assert predict(model, {"instances": instances}) == [
        {"sum": [4, 6], "neg": [-1, -2]},
        {"sum": [5, 6], "neg": [-5, -6]},
    ]
    with pytest.raises(WrongRequest, match="inputs a, b is needed"):
        predict(model, {"instances": [[1, 2]]})


def test_instances_of_several_lengths_are_answered_in_their_order(tmp_path: Path) -> None:
    node = helper.make_node("Neg", ["x"], ["y"])
    path = write_graph(tmp_path, [node], {"x": ["n", "length"]}, {"y": ["n", "length"]})
    instances = [[1.0], [2.0, 3.0], [4.0], []]
    found = predict(OnnxModel(path, 1), {"instances": instances})
    assert found == [[-value for value in each] for each in instances]


def test_a_model_of_one_row_answers_one_instance_after_the_other(tmp_path: Path) -> None:
    node = helper.make_node("Neg", ["x"], ["y"])
    path = write_graph(tmp_path, [node], {"x": [1, 2]}, {"y": [1, 2]})
    found = predict(OnnxModel(path, 1), {"instances": [[1, 2], [3, 4]]})
    assert found == [[-1, -2], [-3, -4]]
    path = write_graph(tmp_path, [node], {"x": [3, 2]}, {"y": [3, 2]})
    with pytest.raises(WrongRequest, match="without an axis for instances"):
        predict(OnnxModel(path, 1), {"instances": [[1, 2]]})


def test_an_output_without_a_row_for_each_instance_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)
    path = write_graph(tmp_path, [node], {"x": ["n", 2]}, {"y": []})
    with pytest.raises(WrongRequest, match="output y has no row for each instance"):
        predict(OnnxModel(path, 1), {"instances": [[1, 2], [3, 4]]})


def test_rows_of_a_dynamically_quantised_model_do_not_change_each_other(tmp_path: Path) -> None:
    """Such a model has one scale for a whole batch, so a large row would blur the others."""
    old = OnnxModel(write_model(tmp_path), 1)
    convert(old.path, tmp_path / "int8.onnx", "dynamic", [])
    model = OnnxModel(tmp_path / "int8.onnx", 1)
    assert (old.mixes, model.mixes) == (False, True)
    row = make_rows(1)[0]
    large = [1000 * value for value in row]
    together = np.asarray([row, large], np.float32)
    mixed = model.run({"x": together}, ["scores"])[0][0].tolist()
    alone = predict(model, {"instances": [row]})[0]
    assert mixed != pytest.approx(alone, rel=0.01), "the model itself mixes the rows"
    assert predict(model, {"instances": [row, large]})[0] == alone


def test_an_input_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        "cast",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
    )
    opset = helper.make_opsetid("", 17)
    path = tmp_path / "cast.onnx"
    save(helper.make_model(graph, opset_imports=[opset], ir_version=9), str(path))
    with pytest.raises(WrongRequest, match="which a request cannot contain"):
        predict(OnnxModel(path), {"instances": [[1.0, 2.0]]})
