"""What Hugging Face's Trainer and Accelerate make of the padded batches in docs/loop.md on 1 and 2 ranks, beside
hvdtrain: `python token_loss.py`, where transformers and accelerate are installed. Prints the rows of the page's table.

All of them train on the same global batches of 16, in the order of the text, in float64, with AdamW and clipping.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "loop.md"
BATCH, UPDATES, LR = 16, 30, 3e-3
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def of_accelerate(model: Any, train: Any, collate: Any) -> float:
    """Trains as Accelerate's quick tour does; the loss of the first batch."""
    from accelerate import Accelerator

    accelerator, first = Accelerator(cpu=True), math.nan
    loader = torch.utils.data.DataLoader(train, BATCH // accelerator.num_processes, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in zip(range(UPDATES), loader, strict=False):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            first = accelerator.reduce(loss.detach(), "mean").item()
    return first


def of_trainer(model: Any, train: Any, collate: Any) -> float:
    """Trains by Trainer; the loss of the first batch, as it logs it."""
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(train)

    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=UPDATES,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = InOrder(model, arguments, data_collator=collate, train_dataset=train)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def of_trainer_counting(model: Any, train: Any, collate: Any) -> float:
    """The same for a model that takes the number of tokens of all ranks, as the models of transformers do."""

    class Counting(type(model)):  # type: ignore[misc]
        def forward(self, num_items_in_batch: Any = None, **batch: Any) -> Any:
            out = super().forward(**batch)
            if num_items_in_batch is not None:
                count = (batch["labels"][:, 1:] != -100).sum()
                out["loss"] = out["loss"] * count / num_items_in_batch
            return out

    model.__class__ = Counting
    return of_trainer(model, train, collate)


def of_hvdtrain(model: Any, train: Any, collate: Any) -> float:
    """Trains by the page's loop; the loss of the first batch."""
    import hvdtrain.torch as ht

    first = math.nan
    with ht.join(device="cpu", engine="ddp" if "WORLD_SIZE" in os.environ else "auto") as world:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        run = world.run("run", model, optimizer)
        for epoch in run.epochs(UPDATES):  # an epoch is a batch: so the order is the text's
            part = torch.utils.data.Subset(train, range(epoch * BATCH, (epoch + 1) * BATCH))
            for batch in run.batches(part, batch_size=BATCH, collate=collate):
                count = (batch["labels"][:, 1:] != -100).sum()
                loss = run.loss(model(**batch)["loss"] * count, count)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                if epoch == 0:
                    first = world.sum(loss.item()) / world.size
    return first


WAYS = {
    "Trainer": of_trainer,
    "Trainer, by num_items_in_batch": of_trainer_counting,
    "Accelerate": of_accelerate,
    "hvdtrain": of_hvdtrain,
}


def train(way: str) -> None:
    """One rank: rank 0 prints the first loss, and that of the validation set after the training."""
    from words import Model, collate, data

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, (examples, valid) = Model(), data()
    first = WAYS[way](model, examples, collate)
    with torch.no_grad():
        last = model.eval()(**collate(valid))["loss"].item()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([first, last]))


def main() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")), sep=", ")
    print("| | first loss, 1 rank | 2 ranks | validation loss, 1 rank | 2 ranks | apart |\n|---|---|---|---|---|---|")
    for way in WAYS:
        found = []
        for launch in ((), TORCHRUN):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "words.py").write_text(next(block for block in blocks if "pad_sequence" in block))
                environ = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([folder, str(REPOSITORY), *sys.path]),
                    "HVDTRAIN_REPORT": "off",
                }
                done = subprocess.run(
                    [sys.executable, *launch, __file__, way],
                    cwd=folder, env=environ, capture_output=True, text=True, check=False,
                )  # fmt: skip
            if done.returncode:
                sys.exit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        firsts, lasts = zip(*found, strict=True)
        numbers = [f"{each:.4f}" for each in (*firsts, *lasts)]
        print("|", " | ".join([way, *numbers, f"{abs(lasts[1] - lasts[0]):.1g}"]), "|", flush=True)


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
