"""An LSTM that learns, letter by letter, to write text in the style of Python's manual. Every
Python installation contains the manual.

python train.py --letters 200000
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train

LETTERS = 128  # ASCII characters; all others are left out
LENGTH = 64  # letters per sample


class Writer(nn.Module):
    """Predicts, for each letter, the scores of all possible next letters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(LETTERS, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(width, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.letter(text))[0])

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        device = self.out.weight.device
        text = list(start.encode())
        known = self.letter(torch.tensor([text], device=device))
        state = None
        for _ in range(count):
            seen, state = self.lstm(known, state)
            odds = F.softmax(self.out(seen[0, -1]) / 0.7, -1)
            text.append(int(torch.multinomial(odds, 1)))
            known = self.letter(torch.tensor([text[-1:]], device=device))
        return bytes(text).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--letters", type=int, default=200_000)
    options = parser.parse_args()

    manual = "\n".join(topics.values()).encode("ascii", "ignore")[: options.letters]
    text = torch.tensor(list(manual))
    samples = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    held = len(samples) // 20  # The samples at the end of the text are used only for evaluation.

    run = train.Run()
    model = run.model(lambda: Writer(options.width))
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr)
    data = run.data(train.Tensors(samples[:-held]), global_batch=16)

    def surprise(text: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    for batch in run.batches(data, epochs=options.epochs):
        value = run.accumulate(lambda part: surprise(part[0]), batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)

    model.eval()
    with torch.no_grad():
        value = surprise(samples[-held:].to(next(model.parameters()).device)).item()
    if run.world.is_first:
        print(f"loss {value:.4f} on held-out text, after {run.steps} steps (guessing: 4.8520)")
        print(model.write("The ", 120))
    run.close()


if __name__ == "__main__":
    main()
