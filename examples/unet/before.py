"""Trains the UNet in one process: python before.py"""

import argparse
from pathlib import Path

import torch
from data import load
from losses import dice_and_bce, iou
from net import UNet
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--images", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, valid_set = load(args.images)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(valid_set, args.batch_size)
    model = UNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        model.train()
        for step, (x, y) in enumerate(train_loader):
            loss = dice_and_bce(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in valid_loader:
                total += iou(model(x.to(device)), y.to(device)).sum().item()
                count += len(x)
        print(f"epoch {epoch} iou {total / count:.4f}", flush=True)
        torch.save({"model": model.state_dict(), "epoch": epoch}, Path("unet.pt"))


if __name__ == "__main__":
    main()
