"""Pretrain a small GPT, letter by letter, on the text of Python's manual, which is part of every
Python installation.

    python train.py --letters 200000

The blocks have the structure of GPT-2; `--width 768 --layers 12` makes the model as large as GPT-2.
On several GPUs, `Plan(shards=0)` splits the model across all GPUs. `Plan(recompute=True,
compile=True, precision="bf16")` reduces memory and time.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train

LETTERS = 128  # ASCII characters; all others are left out
LENGTH = 96  # letters per sample


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        q, k, v = self.ask(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            GptBlock(width, heads=max(width // 64, 2)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=0.02 / deep)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letter(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def write(model: nn.Module, start: str, count: int, device: torch.device) -> str:
    text = torch.tensor([list(start.encode())], device=device)
    for _ in range(count):
        odds = F.softmax(model(text[:, -LENGTH:])[0, -1] / 0.7, -1)
        text = torch.cat([text, torch.multinomial(odds, 1)[None]], 1)
    return bytes(text[0].tolist()).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--letters", type=int, default=200_000)
    options = parser.parse_args()

    manual = "\n".join(topics.values()).encode("ascii", "ignore")[: options.letters]
    text = torch.tensor(list(manual))
    samples = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    # The samples at the end of the text are used only for evaluation.
    held = max(len(samples) // 20, 1)

    run = train.Run()
    model = run.model(lambda: GPT(options.width, options.layers))
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    data = run.data(train.Tensors(samples[:-held]), global_batch=16)
    steps = max(int(options.epochs * (len(samples) - held)) // 16, 1)

    def surprise(text: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(lambda part: surprise(part[0]), batch)
        for group in (
            optimizer.param_groups
            # the learning rate depends only on the step: it rises, then falls like half a cosine
        ):
            warm = min(1, (run.steps + 1) / 20)
            group["lr"] = options.lr * warm * (0.55 + 0.45 * math.cos(math.pi * run.steps / steps))
        run.step(optimizer, clip=1.0)
        run.log(loss=value)

    device = next(model.parameters()).device
    with torch.no_grad():
        value = surprise(samples[-held:].to(device)).item()
    story = write(
        model, "The ", 120, device
    )  # All ranks must call this, because each rank has only a part of a sharded model.
    if run.world.is_first:
        print(f"loss {value:.4f} on held-out text, after {run.steps} steps (guessing: 4.8520)")
        print(story)
    run.close()


if __name__ == "__main__":
    main()
