"""The scripts that `train.py` tunes: ResNet-50 or GPT-2 on random data in memory, at first in plain
fp32.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train


class Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(given, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        short = (nn.Conv2d(given, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.short = nn.Sequential(*short) if stride > 1 or given != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet50(blocks: tuple[int, ...] = (3, 4, 6, 3), least: int = 64) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, least, 7, 2, 3, bias=False),
        nn.BatchNorm2d(least),
        nn.ReLU(inplace=True),
    ]
    layers.append(nn.MaxPool2d(3, 2, 1))
    given = least
    for number, count in enumerate(blocks):
        width = least * 2**number
        for place in range(count):
            layers.append(Bottleneck(given, width, 2 if place == 0 and number else 1))
            given = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.one, self.two = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(self.one(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.two(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, max(width // 64, 1)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.layers(x)))


def main(name: str, size: str) -> None:
    small = size == "small"
    if small:
        torch.set_num_threads(
            1
        )  # two threads that wait for each other take longer than such a step
    if name == "resnet50":
        batch, side = (4, 32) if small else (128, 224)
        build: Any = lambda: resnet50((1, 1), 8) if small else resnet50()  # noqa: E731
        source = train.Tensors(
            torch.randn(4 * batch, 3, side, side), torch.randint(0, 1000, (4 * batch,))
        )
        options: Any = {"lr": 0.1, "momentum": 0.9}
        make: Any = torch.optim.SGD
    else:
        batch, length, words = (2, 32, 128) if small else (8, 1024, 50257)
        build = lambda: Gpt(64, 2, words, length) if small else Gpt(768, 12, words, length)  # noqa: E731
        ids = torch.randint(0, words, (4 * batch, length + 1))
        source = train.Tensors(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        make, options = torch.optim.AdamW, {"lr": 1e-4, "fused": not small}
    run = train.Run(plan=train.Plan(micro_batch=batch, pin=False), save_every=1e9)
    model = run.model(build)
    optimizer = run.optimizer(make, **options)
    data = run.data(source, global_batch=batch)
    syncs = "sync" in sys.argv

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part[0]).flatten(0, -2), part[1].flatten())

    for each in run.batches(data, epochs=1):
        value = run.accumulate(loss, each)
        run.step(optimizer)
        run.log(loss=value.item() if syncs else value)


if __name__ == "__main__":
    main(*sys.argv[1:3])
