"""The network gpt: its parameters and FLOPs, documents that are kept apart, its losses beside a loop of plain PyTorch
on any number of ranks, and what a checkpoint generates."""

import json
import math

import numpy as np
import plain_gpt
import pytest
from marks import marked
from ranks import needs_horovod, needs_torch, train
from refusals import refusal

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from safetensors.torch import save_file  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from hvdtrain.core import network, recipe  # noqa: E402
from hvdtrain.core import plan as plans  # noqa: E402
from hvdtrain.core.progress import Progress  # noqa: E402
from hvdtrain.datasets import Dataset  # noqa: E402
from hvdtrain.errors import RecipeError  # noqa: E402
from hvdtrain.tools import generate, report  # noqa: E402
from hvdtrain.torch.gpt import GPT  # noqa: E402

SMALL = network.GPT(layers=2, heads=4, width=16)


def test_parameters_and_flops_are_those_that_pytorch_counts():
    with torch.device("meta"):
        model, tokens = GPT(SMALL, 257, 12).eval(), torch.zeros(3, 12, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    assert SMALL.flops(257, 12) == counter.get_total_flops() / 3
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert shapes == SMALL.shapes(257, 12)
    of_gpt2 = recipe.load("text:gpt2")
    assert network.named(of_gpt2, 50_257, "torch").parameters == 124_439_808  # that of OpenAI's checkpoint


def test_the_first_weights_are_gpt_2s():
    with torch.no_grad():
        found = dict(GPT(network.GPT(layers=8, width=64), 257, 32).named_parameters())
    assert found["wte.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert found["h.3.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert found["h.3.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert {found[f"h.3.{name}"].unique().item() for name in ("ln_1.bias", "mlp.c_fc.bias")} == {0}
    assert found["ln_f.weight"].unique().item() == 1


def test_separate_documents_have_the_logits_that_each_has_alone():
    model = GPT(SMALL, 11, 9, end=10).double().eval()
    row = torch.tensor([[3, 10, 1, 2, 3, 10, 10, 4, 5]])
    alone = [model(row[:, a:b]) for a, b in ((0, 2), (2, 6), (6, 7), (7, 9))]
    torch.testing.assert_close(model(row), torch.cat(alone, 1), rtol=1e-12, atol=1e-14)


def test_model_args_are_checked():
    for given, line in {
        "depth": "model gpt has no argument 'depth'; it takes dropout, heads, layers, width.",
        "layers": "'layers' in model_args must be greater than 0, got 0.",
        "heads": "width in model_args must be a multiple of heads=5, got 128.",
    }.items():
        value = {"depth": 1, "layers": 0, "heads": 5}[given]
        assert refusal(RecipeError, recipe.load, "text", {"model_args": {given: value}}) == line
    digits = {"model": "gpt", "stem": "imagenet"}
    assert "gpt goes with tokens only" in refusal(RecipeError, recipe.load, "digits", digits)


LAUNCHES = [(ranks, parts, sequences) for ranks in (1, 2, 4) for parts in (1, 4) for sequences in plain_gpt.SEQUENCES]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with tokens as nanoGPT writes them, and weights to start from."""
    folder, draw = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    # 32 windows, and 48 padded rows: so many ranks and micro-batches divide both.
    sizes = {"train": [*[1, 2, 3, 4] * 8, *[6, 2, 3, 4], *range(7, 13)], "val": range(1, 14)}
    for split, of_split in sizes.items():
        documents = [[*draw.integers(plain_gpt.END, size=size).tolist(), plain_gpt.END] for size in of_split]
        ids = np.array([token for document in documents for token in document], np.uint16)
        ids.tofile(folder / f"{split}.bin")
        np.cumsum([0, *map(len, documents[:-1])]).astype(np.uint64).tofile(folder / f"{split}.starts")
        about = {"vocabulary": plain_gpt.VOCABULARY, "dtype": "uint16", "end": plain_gpt.END, "count": len(ids)}
        (folder / f"{split}.json").write_text(json.dumps(about))
    save_file(plain_gpt.first_weights(0), folder / "first.safetensors")
    return folder


def examples(folder, sequences):
    ids = [np.fromfile(folder / f"{split}.bin", np.uint16).tolist() for split in ("train", "val")]
    return [plain_gpt.rows(each, sequences) for each in ids]


@pytest.fixture(scope="module")
def plain(given):
    """By how sequences are made, the losses of plain PyTorch."""
    first = plain_gpt.first_weights(0)
    return {each: plain_gpt.trained(first, *examples(given, each), each) for each in plain_gpt.SEQUENCES}


def keys(folder, sequences, batch):
    return {
        "model": "gpt",
        "model_args": {"layers": plain_gpt.LAYERS, "heads": plain_gpt.HEADS, "width": plain_gpt.WIDTH},
        **{"dataset": "tokens", "data_dir": str(folder), "sequences": sequences, "sequence_length": plain_gpt.LENGTH},
        **{"batch_size": batch, "epochs": plain_gpt.EPOCHS, "base_lr": plain_gpt.LR, "precision": "float64"},
        **{"optimizer": "adamw", "optimizer_args": {"betas": list(plain_gpt.BETAS)}, "clip_norm": plain_gpt.NORM},
        **{"weight_decay": plain_gpt.DECAY, "no_weight_decay": ["bias", "norm"], "log_every_steps": 1},
        "init_from": str(folder / "first.safetensors"),
    }


@needs_horovod
@pytest.mark.launched
@pytest.mark.parametrize(
    ("ranks", "parts", "sequences"),
    marked(LAUNCHES, fast={(2, 4, "padded"), (2, 1, "packed"), (2, 1, "separate")}),
)
def test_losses_are_those_of_a_plain_loop(ranks, parts, sequences, given, plain, tmp_path):
    """All examples are one batch, whose order does not matter."""
    train_rows, valid_rows = examples(given, sequences)
    (tmp_path / "own.yaml").write_text(json.dumps({"default": keys(given, sequences, len(train_rows))}))
    argv = [tmp_path / "own.yaml", "--accumulation-steps", parts, "--output", tmp_path / "run", "--tracker", "none"]
    train("torch", "alone" if ranks == 1 else "mpi", ranks, *argv).good()
    found = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    ours = [(each["train_loss"], each["valid_loss"]) for each in found if each["kind"] == "epoch"]
    np.testing.assert_allclose(ours, plain[sequences], rtol=1e-12)
    tokens = [sum(int((y != -100).sum()) for _, y in rows) for rows in (train_rows, valid_rows)]
    counted = [[each["train_tokens"], each["valid_tokens"]] for each in found if each["kind"] == "epoch"]
    assert counted == [tokens] * plain_gpt.EPOCHS


def test_a_seed_generates_the_same_text_each_time_and_the_report_shows_three(tmp_path, capsys):
    for split in ("train", "val"):
        np.frombuffer(b"def f(x):\n    return x\n" * 9, np.uint8).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
        about = {"vocabulary": 257, "dtype": "uint16", "end": 256, "tokenizer": "bytes"}
        (tmp_path / f"{split}.json").write_text(json.dumps(about))
    more = {"batch_size": 4, "max_steps": 2, "init_from": None, "sequence_length": 16}
    (tmp_path / "own.yaml").write_text(json.dumps({"default": keys(tmp_path, "packed", 4) | more}))
    argv = [tmp_path / "own.yaml", "--output", tmp_path / "run", "--tracker", "none"]
    train("torch", "alone", 1, *argv, HVDTRAIN_REPORT="on").good()
    kept = json.loads((tmp_path / "run/samples.json").read_text())
    assert kept["step"] == 2 and kept["prompt"] == "def f(x):\n    re" and len(set(kept["texts"])) == 3
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("<pre><strong>def f(x):\n    re</strong>") == 3
    hostile = {"step": "<b>", "prompt": "<script>\x1b[2J", "texts": ["\u202eevil", 3, "x" * 10**5]}
    for samples, shown in {json.dumps(hostile): 2, "[1]": 0, '{"texts": "abc", "prompt": "d"}': 0}.items():
        (tmp_path / "run/samples.json").write_text(samples)
        report.main([str(tmp_path / "run"), "--output", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        assert page.count("<strong>&lt;script&gt;\\x1b[2J</strong>") == shown and "<script>" not in page
        assert not {"\x1b", "\u202e"} & {*page} and len(page) < 10**6
    capsys.readouterr()
    texts = []
    for seed in (0, 0, 1):
        generate.main([str(tmp_path / "run"), "--prompt", "def ", "--tokens", "40", "--seed", str(seed)])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("def ")
    assert texts[0].replace("\n", "").isprintable()


# nanoGPT's schedule (train.py): warm-up, then cosine to a tenth; it divides by one update more in the warm-up.
def test_the_learning_rate_of_text_gpt2_is_nanogpts():
    openwebtext = Dataset("tokens", range(9_035_582_198 // 1024), range(9), 50_257, (1024,), (), (), draws=0)
    plan = plans.make(recipe.load("text:gpt2"), 8, openwebtext, network.Network(10, False))
    for step in (2_000, 10_000, 300_000, 599_999):
        done = (step - 2_000) / (600_000 - 2_000)
        expected = 6e-5 + 0.5 * (1 + math.cos(math.pi * done)) * (6e-4 - 6e-5)
        epoch, left = divmod(step, plan.steps_per_epoch)
        assert Progress(step, epoch, left * 480).lr(plan) == pytest.approx(expected, rel=1e-9)
    assert Progress(0, 0, 0).lr(plan) == pytest.approx(6e-4 / 2_000) and plan.total_steps == 600_000
    line = "LR          0.0006 (rule none: not scaled); warm-up over 983,040,000 tokens, then cosine to 6e-05 after "
    assert f"{line}294,912,000,000 tokens" in plan.lines()


TOKENS = {
    "warmup_tokens goes with dataset tokens, packed or separate, got dataset linear; count epochs.": (
        "linear",
        {"warmup_tokens": 5},
    ),
    "decay_tokens goes with dataset tokens, packed or separate, got sequences padded; count epochs.": (
        "text",
        {"decay_tokens": 5, "sequences": "padded"},
    ),
    "the warm-up must be given once: warmup_tokens or warmup_epochs.": ("text", {"warmup_tokens": 5}),
    "decay_tokens is the end of lr_schedule cosine, got constant; drop it.": (
        "text",
        {"decay_tokens": 5, "lr_schedule": "constant"},
    ),
    "lr_floor is where lr_schedule cosine ends, got constant; drop it.": (
        "text",
        {"lr_floor": 0.1, "lr_schedule": "constant"},
    ),
}


@pytest.mark.parametrize("line", TOKENS)
def test_a_schedule_by_tokens_is_refused_where_there_is_none(line):
    assert refusal(RecipeError, recipe.load, *TOKENS[line]) == line
