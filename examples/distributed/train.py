"""Train a small network on scikit-learn's digits by data-parallel processes on several nodes (DDP,
gloo or NCCL).

Start it by torchrun on every node; Cavvy sets what torchrun wants to know: see task.yaml. Rank 0
writes a checkpoint after each epoch into CAVVY_CHECKPOINT_DIR and goes on from it after any loss.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TEST_IMAGES = 360  # the last fifth of the 1,797 images is never trained on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    cuda = torch.cuda.is_available()
    distributed.init_process_group("nccl" if cuda else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    train = TensorDataset(images[:-TEST_IMAGES], labels[:-TEST_IMAGES])
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    path = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", ".")) / "state.pt"
    first = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for batch, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.to(device)), wanted.to(device)).backward()
            optimizer.step()
        if rank == 0:
            state = {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
    with torch.no_grad():
        right = (
            (net(images[-TEST_IMAGES:].to(device)).argmax(1) == labels[-TEST_IMAGES:].to(device))
            .float()
            .mean()
        )
    print(f"rank {rank} of {world}: {float(right):.3f} of the test images are right", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
