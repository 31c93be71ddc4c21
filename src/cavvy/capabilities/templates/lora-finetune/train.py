"""Fine-tunes a language model with LoRA. The model's matrices stay frozen. The product of two thin
matrices is added to each frozen matrix, and only the thin matrices are trained.

    python train.py base && python train.py tune

`base` trains a small model, letter by letter, on Python's manual, because no wheel contains a
language model. `tune` then teaches this model another language (the source code of Python's
library). `tune` trains only a few per cent of the weights, and finally merges these weights into
the frozen matrices, so that the result is as fast as the base model.
"""

import argparse
import csv
import inspect
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train

LETTERS, LENGTH, WIDTH = 128, 64, 96
FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
PLAIN = train.Plan(shards=1)  # Each device has the whole model, so it can save and load the model.


class LoraBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ask, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.ask(self.norm1(x))
            .unflatten(2, (3, 2, WIDTH // 2))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(LoraBlock(), LoraBlock(), LoraBlock())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letter(text) + self.place(torch.arange(text.shape[1], device=text.device))
        return self.head(self.blocks(x))


class Lora(nn.Module):
    """y = W x + s B A x. W is frozen. The matrix B starts at zero, so the output is unchanged at
    first.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * (x @ self.down.T) @ self.up.T

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.linear.weight += self.scale * self.up @ self.down
        return self.linear


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze the model, and wrap each matrix of its blocks in a Lora."""
    model.requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        for name in ("ask", "out", "up", "down"):
            setattr(block, name, Lora(getattr(block, name), rank))
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        for name in ("ask", "out", "up", "down"):
            setattr(block, name, getattr(block, name).merge())
    return model


def cut(text: str) -> torch.Tensor:
    letters = torch.tensor(list(text.encode("ascii", "ignore")))
    return letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)


def surprise(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor) -> dict[str, float]:
    """Return the loss per letter, and the share of letters that the model would have guessed."""
    guessed = model(text[:, :-1]).argmax(2) == text[:, 1:]
    return {"loss": surprise(model, text).item(), "accuracy": guessed.float().mean().item()}


def fit(run: train.Run, model: nn.Module, samples: torch.Tensor, epochs: float, lr: float) -> None:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = run.optimizer(torch.optim.AdamW, learning, lr=lr)
    for batch in run.batches(run.data(train.Tensors(samples), global_batch=16), epochs=epochs):
        value = run.accumulate(lambda part: surprise(model, part[0]), batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)


def base(options: argparse.Namespace) -> None:
    run = train.Run(FOLDER / "base", plan=PLAIN)
    model = run.model(Model)
    fit(run, model, cut("\n".join(topics.values())[: options.letters]), options.epochs, options.lr)
    if run.world.is_first:
        torch.save(model.state_dict(), FOLDER / "base.pt")
        print(f"the base model is trained: {run.steps} steps")
    run.close()


def tune(options: argparse.Namespace) -> None:
    code = "".join(Path(module.__file__).read_text() for module in (argparse, inspect))[
        : options.letters
    ]
    samples = cut(code)
    held = max(len(samples) // 10, 1)
    known, test = samples[:-held], samples[-held:]

    def build() -> nn.Module:
        model = Model()
        model.load_state_dict(torch.load(FOLDER / "base.pt", map_location="cpu", weights_only=True))
        return add_lora(model, options.rank)

    run = train.Run(FOLDER / "lora", plan=PLAIN)
    model = run.model(build)
    test = test.to(next(model.parameters()).device)
    before = evaluate(model, test)
    fit(run, model, known, options.epochs, options.lr)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    learnt, total = sum(n for n, learns in sizes if learns), sum(n for n, _ in sizes)
    after = evaluate(model, test)
    merged = evaluate(merge_lora(model), test)
    if run.world.is_first:
        torch.save(model.state_dict(), FOLDER / "merged.pt")
        print(f"{learnt} of {total} weights learnt ({learnt / total:.1%}), {run.steps} steps")
        print(
            f"loss {after['loss']:.4f} on held-out code ({before['loss']:.4f} before fine-tuning, "
            f"{merged['loss']:.4f} after the new weights were merged into the model)"
        )
        rows = {"before fine-tuning": before, "fine-tuned": after, "merged": merged}
        print(f"guessed right: {before['accuracy']:.1%} before, {after['accuracy']:.1%} after")
        Path("results").mkdir(exist_ok=True)
        with open("results/evaluation.csv", "w", newline="") as table:
            csv.writer(table).writerow(("model", *before))
            csv.writer(table).writerows((name, *row.values()) for name, row in rows.items())
    run.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=["base", "tune"])
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--letters", type=int, default=150_000)
    options = parser.parse_args()
    {"base": base, "tune": tune}[options.stage](options)
