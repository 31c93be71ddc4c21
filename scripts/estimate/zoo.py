"""Trace the models that `cavvy estimate --model` knows, and write their profiles to
planner/estimate/zoo.jsonl.gz.

Needs torch, torchvision and transformers (4.57), which are no dependencies of the project. No
weights are loaded: every tensor is fake. Run: python scripts/estimate/zoo.py
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[2] / "src/cavvy/planner/estimate/zoo.jsonl.gz"
VISION = {
    "resnet18": 64,
    "resnet34": 64,
    "resnet50": 64,
    "resnet101": 64,
    "resnet152": 64,
    "vit_b_16": 32,
    "vit_l_16": 16,
    "convnext_tiny": 32,
    "efficientnet_b0": 64,
    "mobilenet_v3_large": 64,
}
GPT2 = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}
BERT = {
    "bert-base": (768, 12, 12, 128),
    "bert-large": (1024, 24, 16, 128),
    "bert-large-512": (1024, 24, 16, 512),
}
# Llama 3.2 1B and 3B, 3.1 8B and 70B: width, layers, heads, key heads, inner width, tied head
# (their config.json).
LLAMA = {
    "llama-1b": (2048, 16, 32, 8, 8192, True),
    "llama-3b": (3072, 28, 24, 8, 8192, True),
    "llama-8b": (4096, 32, 32, 8, 14336, False),
    "llama-70b": (8192, 80, 64, 8, 28672, False),
}


PIXELS, TOKENS = 224, {"gpt2": 1024, "llama": 2048}  # of a sample


def count_tokens(name: str) -> int:
    return BERT[name][3] if name in BERT else TOKENS[name.partition("-")[0]]


def describe_sample(name: str) -> str:
    if name in VISION:
        return f"image of {PIXELS} x {PIXELS} pixels"
    return f"sequence of {count_tokens(name):,} tokens"


def make_vision(name: str, batch: int, checkpointing: bool) -> tuple[Any, Callable[[], Any]]:
    import torch
    import torchvision

    model = getattr(torchvision.models, name)()
    images, labels = torch.randn(batch, 3, PIXELS, PIXELS), torch.randint(0, 1000, (batch,))
    return model, lambda: torch.nn.functional.cross_entropy(model(images), labels)


def make_text(name: str, batch: int, checkpointing: bool) -> tuple[Any, Callable[[], Any]]:
    import torch
    import transformers as hf

    if name in GPT2:
        width, layers, heads = GPT2[name]
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=width, n_layer=layers, n_head=heads))
    elif name in BERT:
        width, layers, heads, _ = BERT[name]
        config = hf.BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        model = hf.BertForMaskedLM(config)
    else:
        width, layers, heads, key_heads, inner, tied = LLAMA[name]
        config = hf.LlamaConfig(
            vocab_size=128256,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            intermediate_size=inner,
            tie_word_embeddings=tied,
        )
        model = hf.LlamaForCausalLM(config)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    words = torch.randint(0, 1000, (batch, count_tokens(name)))
    more = {} if name in BERT else {"use_cache": False}
    return model, lambda: model(input_ids=words, labels=words, **more).loss


def list_wanted() -> Iterator[tuple[str, int, str, bool]]:
    for name, batch in VISION.items():
        for precision in ("fp32", "bf16"):
            yield name, batch, precision, False
    for name in (*GPT2, *BERT, *LLAMA):
        for precision in ("fp32", "bf16"):
            for checkpointing in (False, True):
                yield (
                    name,
                    8 if name in GPT2 else 32 if name in BERT else 2,
                    precision,
                    checkpointing,
                )


def main() -> None:
    from cavvy.capabilities.estimates.tracer.fake_device import fake_device
    from cavvy.capabilities.estimates.tracer.trace import trace_step

    lines = []
    for name, batch, precision, checkpointing in list_wanted():
        with fake_device():
            make = make_vision if name in VISION else make_text
            model, step = make(name, batch, checkpointing)
            profile = trace_step(model, step, batch=batch, precision=precision, name=name)
        profile |= {"checkpointing": checkpointing, "sample": describe_sample(name)}
        lines.append(json.dumps(profile, separators=(",", ":")))
        print(
            name,
            precision,
            "checkpointed" if checkpointing else "",
            len(lines[-1]),
            file=sys.stderr,
            flush=True,
        )
    with gzip.GzipFile(OUT, "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
