"""Trains the language model in one process: python before.py"""

import argparse
import math
from pathlib import Path

import torch
from data import load
from net import Transformer
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--characters", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, valid_set = load(characters=args.characters)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(valid_set, args.batch_size)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps, warmup = args.epochs * len(train_loader), len(train_loader) // 2

    def lr_factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"].to(device))
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].to(device).flatten())

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in valid_loader:
                total += loss_of(batch).item() * len(batch["tokens"])
                count += len(batch["tokens"])
        print(f"epoch {epoch} bits a character {total / count / math.log(2):.4f}", flush=True)
        torch.save({"model": model.state_dict(), "epoch": epoch}, Path("lm.pt"))


if __name__ == "__main__":
    main()
