"""What Hugging Face's Trainer and Accelerate make of docs/bring.md's padded batches on 1 and 2 ranks, beside hvdtrain:
`python token_loss.py`, where transformers and accelerate are installed. Prints the rows of the page's table.

All of them train the page's model in float64 on the same global batches of 16, in the order of the text, with AdamW.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "bring.md"
BATCH, UPDATES, LR = 16, 40, 3e-3
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Ways:
    """A function a way to train: it returns the loss that was logged of the first batch, and the model."""

    @staticmethod
    def accelerate(model: Any, train: Any, collate: Any) -> tuple[float, Any]:
        """As Accelerate's quick tour has it."""
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        loader = torch.utils.data.DataLoader(train, BATCH // accelerator.num_processes, collate_fn=collate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        first = math.nan
        for step, batch in enumerate(loader):
            loss = wrapped(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            first = accelerator.reduce(loss.detach(), "mean").item() if step == 0 else first
            if step == UPDATES - 1:
                break
        return first, model

    @staticmethod
    def trainer(model: Any, train: Any, collate: Any) -> tuple[float, Any]:
        """Trainer, whose every loss is logged."""
        import torch
        from transformers import Trainer, TrainingArguments

        class InOrder(Trainer):  # type: ignore[misc]
            def _get_train_sampler(self, *given: Any) -> Any:
                return torch.utils.data.SequentialSampler(train)

        size = int(os.environ.get("WORLD_SIZE", 1))
        arguments = TrainingArguments(
            "out",
            per_device_train_batch_size=BATCH // size,
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
        return trainer.state.log_history[0]["loss"], model

    @staticmethod
    def hvdtrain(model: Any, train: Any, collate: Any) -> tuple[float, Any]:
        """The page's loop, in the order of the text."""
        import torch

        import hvdtrain.torch as ht

        with ht.join(device="cpu", engine="ddp" if "WORLD_SIZE" in os.environ else "auto") as world:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
            run = world.run("run", model, optimizer)
            for epoch in run.epochs(UPDATES):
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
        return first, model


def train(way: str) -> None:
    """One rank: prints the first loss, and that of the validation set after the training."""
    import torch
    from words import Model, collate, data

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    examples, valid = data()
    first, model = getattr(Ways, way)(Model(), examples, collate)
    with torch.no_grad():
        last = model.eval()(**collate(valid))["loss"].item()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([first, last]))


def main() -> None:
    from importlib.metadata import version

    words = next(block for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M) if "pad_seq" in block)
    print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")), sep=", ")
    for way in ("trainer", "accelerate", "hvdtrain"):
        found = []
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "words.py").write_text(words)
                launch = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
                environ = {**os.environ, "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", "HVDTRAIN_REPORT": "off"}
                command = [*launch, __file__, way]
                done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        (first, last), (first_2, last_2) = found
        print(f"| {way} | {first:.4f} | {first_2:.4f} | {last:.4f} | {last_2:.4f} | {abs(last_2 - last):.1g} |", flush=True)


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
