"""Our server of ONNX models: requests of the Open Inference Protocol, metrics, and optimisation."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from cavvy.model_server import processing
from cavvy.model_server.http_server import ModelServer
from cavvy.model_server.inference import CountedModel, OnnxModel, WrongRequest
from cavvy.model_server.optimise import compare, convert, list_kinds, read_samples
from cavvy.model_server.publish import publish, to_onnx

WIDTH = 64


def write_model(folder: Path, *, kernel: bool = False) -> Path:
    """A classifier of WIDTH numbers: two matrices, after a convolution if `kernel` is set."""
    random = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(random.standard_normal(shape).astype("float32"), name)

    shape = ["n", 1, WIDTH] if kernel else ["n", WIDTH]
    weights = [weight("a", WIDTH, WIDTH), weight("b", WIDTH, 10)]
    nodes = [
        helper.make_node("MatMul", ["h" if kernel else "x", "a"], ["y"]),
        helper.make_node("Relu", ["y"], ["z"]),
        helper.make_node("MatMul", ["z", "b"], ["scores"]),
    ]
    if kernel:
        weights.append(weight("k", 1, 1, 3))
        nodes.insert(0, helper.make_node("Conv", ["x", "k"], ["h"], pads=[1, 1]))
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [*shape[:-1], 10])],
        weights,
    )
    opset = helper.make_opsetid("", 17)
    save(helper.make_model(graph, opset_imports=[opset], ir_version=9), str(folder / "tiny.onnx"))
    return folder / "tiny.onnx"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    served = CountedModel("tiny", OnnxModel(write_model(tmp_path), 1), {"agreement": 0.5})
    with ModelServer(("127.0.0.1", 0), served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data), timeout=30) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def tensor(**changes: Any) -> dict[str, Any]:
    data = {"name": "x", "shape": [2, WIDTH], "datatype": "FP32", "data": [0.5] * (2 * WIDTH)}
    return {"inputs": [{**data, **changes}]}


def test_a_request_of_the_protocol_is_answered(url: str) -> None:
    assert ask(f"{url}/v2/health/ready")[0] == ask(f"{url}/v2/models/tiny/ready")[0] == 200
    about = json.loads(ask(f"{url}/v2/models/tiny")[1])
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, WIDTH]}]
    status, body = ask(f"{url}/v2/models/tiny/infer", {"id": "7", **tensor()})
    answer = json.loads(body)
    assert (status, answer["id"], answer["model_name"]) == (200, "7", "tiny")
    [scores] = answer["outputs"]
    assert (scores["name"], scores["datatype"], scores["shape"]) == ("scores", "FP32", [2, 10])
    assert scores["data"][:10] == scores["data"][10:], "both rows are equal"
    metrics = ask(f"{url}/metrics")[1].decode()
    assert 'model_requests_total{model="tiny",outcome="success"} 1' in metrics
    assert 'model_agreement{model="tiny"} 0.5' in metrics


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the request is not JSON: Expecting"),
        ([], "a list `inputs`"),
        ({"inputs": []}, "also needs the inputs x"),
        (tensor(name="y"), "there is no input 'y'; expected x"),
        (tensor(datatype="INT64"), "must be FP32"),
        (tensor(shape=[3, WIDTH]), "cannot reshape"),
        (tensor(shape=[1, 2 * WIDTH]), "Got: 128 Expected: 64"),
        (tensor(data=["a"]), "could not convert"),
        (tensor(data=None), "needs the lists `data` and `shape`"),
        (tensor(data=0.5, shape=1), "needs the lists `data` and `shape`"),
        (tensor(shape=None), "needs the lists `data` and `shape`"),
        ({**tensor(), "outputs": [{"name": "other"}]}, "expected scores"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(url: str, body: Any, said: str) -> None:
    status, answer = ask(f"{url}/v2/models/tiny/infer", body)
    assert (status, said in json.loads(answer)["error"]) == (400, True), answer
    assert ask(f"{url}/v2/models/other/infer", tensor())[0] == 404


def test_no_request_has_an_input_without_a_datatype(tmp_path: Path) -> None:
    shape = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    kind = helper.make_sequence_type_proto(shape)
    graph = helper.make_graph(
        [helper.make_node("SequenceLength", ["s"], ["count"])],
        "sequence",
        [helper.make_value_info("s", kind)],
        [helper.make_tensor_value_info("count", TensorProto.INT64, [])],
    )
    opset = helper.make_opsetid("", 17)
    path = tmp_path / "sequence.onnx"
    save(helper.make_model(graph, opset_imports=[opset], ir_version=9), str(path))
    asked = {"name": "s", "shape": [1], "datatype": "FP32", "data": [1.0]}
    with pytest.raises(WrongRequest, match="which a request cannot contain"):
        OnnxModel(path, 1).infer({"inputs": [asked]})


def test_a_head_request_gets_no_body(url: str) -> None:
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=30)) as connection:
        for path, status in (("/v2/health/ready", 200), ("/v2/models/tiny", 200), ("/none", 404)):
            for method in ("HEAD", "GET"):
                connection.request(method, path)
                answer = connection.getresponse()
                length = 0 if method == "HEAD" else int(answer.headers["Content-Length"])
                assert (answer.status, len(answer.read())) == (status, length)


@pytest.mark.parametrize(
    "end", [b"0\r\n\r\n", b"0\r\nX-Sum: 1\r\n\r\n", b"-1\r\n", b"40000001\r\n"]
)
def test_a_chunked_body_is_read(url: str, end: bytes) -> None:
    body = json.dumps(tensor()).encode()
    valid = end.startswith(b"0")
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=30)) as connection:
        for _ in range(2 if valid else 1):
            connection.putrequest("POST", "/v2/models/tiny/infer")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            for piece in (body[:7], body[7:]):
                connection.send(b"%X;a=b\r\n%b\r\n" % (len(piece), piece))
            connection.send(end)
            answer = connection.getresponse()
            assert answer.status == (200 if valid else 411)
            assert ("outputs" if valid else "error") in json.loads(answer.read())


@pytest.mark.parametrize(
    "head",
    [
        "GET /v2 HTTP/1.1\r\nContent-Length: 25",
        "GET /v2 HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST /v2/models/tiny/infer HTTP/1.1\r\nTransfer-Encoding: gzip, chunked",
        "POST /v2/models/tiny/infer HTTP/1.1\r\nContent-Length: 9\r\nTransfer-Encoding: chunked",
    ],
)
def test_a_body_that_is_not_read_is_no_request(url: str, head: str) -> None:
    """The gateway sends requests of several clients on one connection, so an answer too many would
    go to the next of them.
    """
    inner = "GET /metrics HTTP/1.1\r\n\r\n"
    body = f"{len(inner):x}\r\n{inner}\r\n0\r\n\r\n" if "chunked" in head else inner
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}\r\nHost: x\r\n\r\n{body}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.count(b"HTTP/1.") == 1, answer
    assert b"Connection: close\r\n" in answer, "so the gateway does not use it again"


@pytest.mark.parametrize("kernel", [False, True])
def test_a_model_of_8_bits_agrees_with_the_original(tmp_path: Path, kernel: bool) -> None:
    old = OnnxModel(write_model(tmp_path, kernel=kernel), 1)
    samples = read_samples(old, "")
    kind = list_kinds(old.path)[-1]
    assert kind == ("static" if kernel else "dynamic")
    convert(old.path, tmp_path / "int8.onnx", kind, samples[::2])
    assert (tmp_path / "int8.onnx").stat().st_size < old.path.stat().st_size / 2
    found = compare(old, OnnxModel(tmp_path / "int8.onnx", 1), samples[1::2], "cosine")
    assert found["agreement"] > 0.99
    other = OnnxModel(write_other(tmp_path, old), 1)
    assert compare(old, other, samples, "top")["agreement"] < 0.5, "another model does not agree"


def write_other(folder: Path, old: OnnxModel) -> Path:
    """A model with the same form and other weights."""
    (folder / "other").mkdir()
    path = write_model(folder / "other", kernel=len(old.inputs["x"].shape) == 3)
    data = path.read_bytes()
    import onnx

    model = onnx.load_from_string(data)
    for weight in model.graph.initializer:
        weight.raw_data = np.ascontiguousarray(numpy_helper.to_array(weight)[..., ::-1]).tobytes()
    onnx.save(model, str(path))
    return path


def test_samples_come_from_a_file(tmp_path: Path) -> None:
    model = OnnxModel(write_model(tmp_path), 1)
    np.savez(tmp_path / "samples.npz", x=np.ones((5, WIDTH)))
    assert [each["x"].shape for each in read_samples(model, str(tmp_path / "samples.npz"))] == [
        (1, WIDTH)
    ] * 5
    (tmp_path / "samples.jsonl").write_text(json.dumps(tensor()) + "\n\n")
    assert [each["x"].shape for each in read_samples(model, str(tmp_path / "samples.jsonl"))] == [
        (2, WIDTH)
    ]


@pytest.mark.parametrize(("kind", "form"), [("int8", "npz"), ("fp16", "jsonl"), ("", "npz")])
def test_a_published_model_is_measured_before_and_after_its_conversion(
    tmp_path: Path, kind: str, form: str
) -> None:
    source, target = write_model(tmp_path, kernel=False), tmp_path / "new.onnx"
    model = OnnxModel(source, 1)
    samples = [each["x"] for each in read_samples(model, "")]
    labels = [int(model.run({"x": x}, list(model.outputs))[0].argmax()) for x in samples]
    labels[1] += 1  # of 16 samples that measure, the model gets one wrong
    file = tmp_path / f"set.{form}"
    if form == "npz":
        np.savez(file, x=np.concatenate(samples), labels=labels)
    else:
        rows = zip(samples, labels, strict=True)
        told = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH]}
        lines = [{"inputs": [{**told, "data": x.ravel().tolist()}], "label": y} for x, y in rows]
        file.write_text("\n".join(map(json.dumps, lines)))
    found = publish(source, target if kind else None, kind, str(file))
    wrong = 1 / found["samples"]
    if not kind:
        assert found == {"accuracy": 1 - wrong, "samples": 32.0}
        return
    assert found["accuracy_before"] == 1 - wrong
    assert found["accuracy"] > 0.8
    assert target.stat().st_size < 0.6 * found["bytes_before"]
    assert OnnxModel(target).inputs["x"].type == "tensor(float)"


def test_a_set_with_too_few_labels_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.npz"
    np.savez(file, x=np.ones((5, WIDTH)), labels=[1, 2])
    with pytest.raises(ValueError, match="2 labels for 5 samples"):
        publish(write_model(tmp_path), tmp_path / "new.onnx", "int8", str(file))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_torchscript_model_is_compared_with_what_onnx_makes_of_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnx")

    class Tiny(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Any) -> Any:
            return torch.softmax(x @ self.weight, -1), x.mean(-1)

    class Lucky(Tiny):
        def forward(self, x: Any) -> Any:
            return x + torch.rand(1)

    source, target, file = tmp_path / "m.pt", tmp_path / "m.onnx", tmp_path / "set.npz"
    rows = np.random.default_rng(1).standard_normal((7, 4))
    np.savez(file, anything=rows, labels=np.zeros(7))
    torch.jit.trace(Tiny(), torch.ones(2, 4)).save(source)
    found = to_onnx(source, target, str(file))
    assert found["compared"] == 7
    assert found["difference"] < 1e-5
    assert OnnxModel(target).run({"x": rows.astype("float32")}, list(OnnxModel(target).outputs))
    torch.jit.trace(Lucky(), torch.ones(2, 4), check_trace=False).save(source)
    with pytest.raises(ValueError, match="differ by"):
        to_onnx(source, target, str(file))
    np.savez(file, x=rows[:0])
    with pytest.raises(ValueError, match="no samples"):
        to_onnx(source, target, str(file))
    np.savez(file, a=rows, b=rows)
    with pytest.raises(ValueError, match="no array x"):
        to_onnx(source, target, str(file))
    np.savez(file, x=np.array([{}], object))  # a pickle, which is not read
    with pytest.raises(ValueError, match="allow_pickle"):
        to_onnx(source, target, str(file))
    torch.save({"weights": torch.ones(3)}, source)
    with pytest.raises(ValueError, match=r"m\.pt is no TorchScript model"):
        to_onnx(source, target, str(file))


PROCESS = """
import os, time
def before(request):
    if request.get("crash"):
        os._exit(1)
    if request.get("fork") and not os.fork():
        time.sleep(60)  # with the pipes of the process that is to end
    while request.get("loop"):
        pass
    if request.get("memory"):
        bytearray(1 << 34)
    print("not a part of the answer")
    return {"instances": [[float(pixel) / 255 for pixel in row] for row in request["pixels"]]}
def after(request, answer):
    rows = answer["predictions"]
    return {"classes": [row.index(max(row)) for row in rows], "for": len(request["pixels"])}
"""


def test_a_file_beside_a_model_prepares_requests_and_answers_within_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processing, "_TIME_S", 2.0)
    (tmp_path / processing.FILE).write_text(PROCESS)
    served = CountedModel("tiny", OnnxModel(write_model(tmp_path), 1), {})
    made = processing.Processing(tmp_path / processing.FILE)
    with ModelServer(("127.0.0.1", 0), served, made) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1/models/tiny:predict"
        try:
            good = {"pixels": [[255] * WIDTH, [0] * WIDTH]}
            first = ask(url, good)
            assert first[0] == 200
            assert json.loads(first[1])["for"] == 2
            for wrong, status, told in (
                ({}, 400, "KeyError: 'pixels'"),
                ({"pixels": [["x"]]}, 400, "ValueError"),
                ({"memory": 1}, 400, "MemoryError"),
                ({"crash": 1}, 500, "its process ended"),
                ({"loop": 1}, 500, "more than"),
                ({"loop": 1, "fork": 1}, 500, "more than"),
            ):
                answer = ask(url, wrong)
                assert (answer[0], told in answer[1].decode()) == (status, True), answer
                assert ask(url, good) == first
        finally:
            server.shutdown()
            made.close()


def test_a_call_without_end_ends_also_if_the_engine_was_killed(tmp_path: Path) -> None:
    file = tmp_path / processing.FILE
    file.write_text(PROCESS)
    code = (
        f"from cavvy.model_server import processing as p; p._START_S = 0.0; p.main([{str(file)!r}])"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
        assert left.stdin is not None
        left.stdin.write(b'{"do": "before", "values": [{"loop": 1}]}\n')
        left.stdin.close()
        try:
            assert left.wait(20) == -signal.SIGALRM
        finally:
            left.kill()


@pytest.mark.parametrize("text", ["def before(:", "import missing_package", "#" * 70_000])
def test_a_file_that_cannot_be_used_ends_the_engine(tmp_path: Path, text: str) -> None:
    """So that a version with it is refused in its trial."""
    (tmp_path / processing.FILE).write_text(text)
    with pytest.raises(processing.ProcessingFailed, match=r"cannot be loaded|more than 64 KiB"):
        processing.Processing(tmp_path / processing.FILE)


def test_a_server_ends_when_the_program_that_started_it_is_killed(tmp_path: Path) -> None:
    """Otherwise, a device whose program was killed would have two engines in its memory."""
    words = f"{sys.executable} -m cavvy.model_server --with-parent --port 0 --model"
    line = f"{words} {write_model(tmp_path)} & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = Path(f"/proc/{int(parent.stdout.readline())}/cmdline")
    assert "serves tiny.onnx" in parent.stdout.readline()
    assert b"--with-parent" in server.read_bytes()
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "", "until the server has closed it, too"
    parent.stdout.close()
