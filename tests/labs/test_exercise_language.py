"""Lab 8: each gap filled right, and wrong in the usual ways: a message names what is wrong, and why. Its text."""

import math
import sys

import jupytext
import paths
import pytest
from fillings import by_gap, check_right, check_tried, check_wrong
from marks import marked

from labtools import Ranks, text
from labtools.exercises.language import LOADED, Check

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

clip = torch.nn.utils.clip_grad_norm_


@pytest.fixture(scope="module")
def check():
    ranks = Ranks(3, preload=LOADED)
    yield Check(ranks)
    ranks.close()


def nothing(*given): ...


def loss_sum(model, x, y, reduction="sum"):
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def tokens_of(y):
    return (y != -100).sum().item()


def total_of(world, parts, of=tokens_of):
    return world.sum(sum(of(y) for _, y in parts))


def accumulates(divisor, clear=False, parts=lambda parts: parts, then=lambda world, model: None):
    """An accumulate that divides by divisor(world, all parts, the part's y)."""

    def accumulate(world, model, given):
        for x, y in parts(given):
            if clear:
                model.zero_grad()
            (loss_sum(model, x, y) / divisor(world, given, y)).backward()
        then(world, model)

    return accumulate


def summed(world, model, factor=1.0):
    for weight in model.parameters():
        weight.grad = world.sum(weight.grad) * factor


def right_accumulate(world, model, parts):
    count = total_of(world, parts)
    for x, y in parts:
        (loss_sum(model, x, y) / count).backward()


def at_once(world, model, parts):
    longest = max(x.shape[1] for x, _ in parts)
    x, y = (
        torch.cat([torch.nn.functional.pad(each, (0, longest - each.shape[1]), value=value) for each in of])
        for of, value in zip(zip(*parts, strict=True), (0, -100), strict=True)
    )
    (loss_sum(model, x, y) / world.sum(tokens_of(y))).backward()


def waits(world, model, parts):
    if world.rank == 0:
        right_accumulate(world, model, parts)
    else:
        accumulates(lambda *_: 1)(world, model, parts)


def right_reduce(world, model, most):
    summed(world, model)
    return clip(model.parameters(), most).item()


def by_hand(world, model, most):
    summed(world, model)
    norm = sum(weight.grad.square().sum() for weight in model.parameters()).sqrt()
    for weight in model.parameters():
        weight.grad *= min(1, most / norm)
    return norm


def reduces(before=nothing, add=summed, after=lambda model, most: clip(model.parameters(), most), gives=True):
    """A reduce made of these parts."""

    def reduce(world, model, most):
        first = before(model, most)
        add(world, model)
        norm = after(model, most)
        return (first if norm is None else norm) if gives else None

    return reduce


def each_alone(model, most):
    return sum(clip([weight], most) for weight in model.parameters())


def values(model, most):
    torch.nn.utils.clip_grad_value_(model.parameters(), most)
    return 1.0


def always(model, most):
    norm = clip(model.parameters(), math.inf)
    for weight in model.parameters():
        weight.grad *= most / norm
    return norm


def without_root(model, most):
    norm = clip(model.parameters(), math.inf) ** 2
    for weight in model.parameters():
        weight.grad *= min(1, most / norm)
    return norm


def norm_of_own(world, model, most):
    norm = clip(model.parameters(), math.inf)
    summed(world, model)
    for weight in model.parameters():
        weight.grad *= min(1, most / norm)
    return norm


def norm_after(world, model, most):
    right_reduce(world, model, most)
    return clip(model.parameters(), math.inf).item()


def losses(texts):
    """A model that needs 1 nat for a small letter and 6 for anything else."""
    costs = [1.0 if letter.islower() else 6.0 for each in texts for letter in each]
    return sum(costs), len(costs)


def seconds(n, k, micro, add, cores, ring=lambda n: 2 * (n - 1) / n):
    return k / min(n, cores) * micro + ring(n) * add


WRONG = {
    "micro_batches, empty": (nothing, "Gap 1, micro_batches, is still empty"),
    "micro_batches, one rank": (lambda t, s, length, n: t // (s * length), "as many as one rank alone would need"),
    "micro_batches, sequences": (lambda t, s, length, n: t // length, "the number of sequences that an update has"),
    "micro_batches, no length": (lambda t, s, length, n: t // (s * n), "it counts sequences where tokens are meant"),
    "micro_batches, a fraction": (lambda t, s, length, n: t / (s * length * n), "gives 16.0, and range.. needs a whol"),
    "micro_batches, at once": (lambda t, s, length, n: s * length * n, "the tokens of all micro-batches that run at"),
    "micro_batches, multiplied": (lambda t, s, length, n: t // (s * length) * n, "it is multiplied by the ranks"),
    "mean_per_token, empty": (nothing, "Gap 2, mean_per_token, is still empty"),
    "mean_per_token, its own": (lambda w, t, c: t / max(1, c), "the mean over its own tokens: 5.00, 2.50, 2.00 on"),
    "mean_per_token, of means": (
        lambda w, t, c: w.sum(t / max(1, c)) / w.size,
        "takes the mean of the ranks' means, .*: 3.17, .* 78 nats over 20 tokens are 3.90",
    ),
    "mean_per_token, sum of means": (lambda w, t, c: w.sum(t / max(1, c)), "adds up the ranks' means"),
    "mean_per_token, own count": (lambda w, t, c: w.sum(t) / max(1, c), "divides all ranks' losses by this rank's tok"),
    "mean_per_token, own total": (lambda w, t, c: t / w.sum(c), "divides this rank's losses by all ranks' tokens"),
    "mean_per_token, never divided": (lambda w, t, c: w.sum(t), "the sum of the losses, which nothing divides"),
    "mean_per_token, of means, no token": (lambda w, t, c: w.sum(t / c) / w.size, "takes the mean of the ranks' means"),
    "mean_per_token, no token": (
        lambda w, t, c: w.sum(t / c * c) / w.sum(c),
        "is right while each rank has tokens, but a rank that has none divides by 0",
    ),
    "mean_per_token, rank 0 alone": (
        lambda w, t, c: w.sum(t) / w.sum(c) if w.is_rank_0 else 0.0,
        "(is not for some ranks only|stopped)",
    ),
    "ragged, empty": (([...], [...]), "Gap 3, ragged, is still empty"),
    "ragged, untouched": (..., "is still empty: a list of texts"),
    "ragged, one list": (["abc"], "and not two lists, the texts of rank 0"),
    "ragged, texts": (("abc", "ABC"), "has 'abc' for rank 0, and not a list"),
    "ragged, bytes": (([b"abc"], ["ABC"]), "has b'abc' for rank 0, where a text"),
    "ragged, no text": ((["abc"], []), r"has \[\] for rank 1, and not a list of one or more"),
    "ragged, as many": ((["abc"], ["ABC"]), "has 3 tokens on each rank: then both means are the same, 3.50"),
    "ragged, alike": ((["abc"], ["ab"]), "costs 1.00 a token on rank 0 and 1.00 on rank 1: alike"),
    "ragged, faint": ((["abcabcabcabc"], ["ABCABCABCAB"]), "shows the mistake faintly: 3.50 in place of 3.39"),
    "accumulate, empty": (nothing, "Gap 4, accumulate, is still empty"),
    "accumulate, of means": (
        lambda w, m, parts: accumulates(lambda _, __, y: tokens_of(y) * len(parts))(w, m, parts),
        "takes the mean of micro-batches' means",
    ),
    "accumulate, of all means": (
        lambda w, m, parts: accumulates(lambda *g: tokens_of(g[2]) * len(parts) * w.size)(w, m, parts),
        "takes the mean of micro-batches' means",
    ),
    "accumulate, means added": (accumulates(lambda _, __, y: tokens_of(y)), "adds up the means of the micro-batches"),
    "accumulate, own tokens": (
        accumulates(lambda _, parts, y: sum(tokens_of(y) for _, y in parts)),
        "divides by this rank's tokens alone",
    ),
    "accumulate, nothing divides": (accumulates(lambda *_: 1), "divides by nothing: a gradient of the sum"),
    "accumulate, padding": (
        accumulates(lambda world, parts, _: total_of(world, parts, torch.Tensor.numel)),
        "counts the padding too",
    ),
    "accumulate, cleared": (
        accumulates(lambda world, parts, _: total_of(world, parts), clear=True),
        "keeps the last micro-batch alone",
    ),
    "accumulate, the first": (
        accumulates(lambda world, parts, _: total_of(world, parts), parts=lambda parts: parts[:1]),
        "stops after the first micro-batch",
    ),
    "accumulate, all ranks": (
        accumulates(lambda world, parts, _: total_of(world, parts), then=summed),
        "adds up the ranks' shares already: that is the next gap",
    ),
    "accumulate, divided twice": (
        accumulates(lambda world, parts, _: total_of(world, parts) * world.size),
        "is 0.333 times what it should be",
    ),
    "accumulate, at once": (at_once, "gives the model 4 sequences at once"),
    "accumulate, rank 0 alone": (waits, "(is not for some ranks only|stopped)"),
    "reduce, empty": (nothing, "Gap 5, reduce, is still empty: every rank still has its share"),
    "reduce, no sum": (reduces(add=nothing), "leaves each rank a gradient of its own"),
    "reduce, no clip": (reduces(after=lambda model, most: clip(model.parameters(), math.inf)), "does not clip: the"),
    "reduce, clipped first": (
        reduces(before=lambda model, most: clip(model.parameters(), most), after=nothing),
        "clips each rank's share, and adds them up then",
    ),
    "reduce, the mean": (reduces(add=lambda w, m: summed(w, m, 1 / w.size)), "takes the mean of the 3 shares"),
    "reduce, each tensor": (reduces(after=each_alone), "clips each tensor by itself: that changes the direction"),
    "reduce, values": (reduces(after=values), "cuts off single numbers"),
    "reduce, always": (reduces(after=always), "makes a small gradient larger"),
    "reduce, no root": (reduces(after=without_root), "forgets the root"),
    "reduce, its own norm": (norm_of_own, "shortens the gradient by another factor on each rank"),
    "reduce, no norm": (reduces(gives=False), "clips, but gives back no norm"),
    "reduce, norm after": (norm_after, "gives back 2.00, 2.00, 2.00, where the gradient had the norm"),
    "predicted, empty": (nothing, "Gap 6, predicted, is still empty"),
    "predicted, each time": (
        lambda n, k, micro, add, cores: k / min(n, cores) * (micro + 2 * (n - 1) / n * add),
        "it adds the gradients up after each micro-batch",
    ),
    "predicted, not shared": (lambda n, k, micro, add, cores: k * micro + 2 * (n - 1) / n * add, "they share them"),
    "predicted, no cores": (lambda n, k, m, a, cores: seconds(n, k, m, a, math.inf), "it forgets that ranks share cor"),
    "predicted, one rank": (lambda *given: seconds(*given, ring=lambda n: 1), "it adds gradients up on one rank too"),
    "predicted, no ring": (lambda *given: seconds(*given, ring=lambda n: 0), "it forgets what adding up takes"),
    "predicted, N - 1": (lambda *given: seconds(*given, ring=lambda n: n - 1), "and not N - 1 of it"),
    "predicted, one phase": (lambda *given: seconds(*given, ring=lambda n: (n - 1) / n), "there are two phases"),
}
WAITING = {name for name in WRONG if "rank 0 alone" in name}
RIGHT = {
    "micro_batches": [lambda tokens, sequences, length, ranks: tokens // sequences // length // ranks],
    "mean_per_token": [lambda world, *given: world.mean(*given), lambda w, t, c: w.sum(float(t)) / w.sum(c)],
    "ragged": [(["lower case"], ["X"]), [["A", "B"], ["many more small letters"]]],
    "accumulate": [right_accumulate, accumulates(lambda world, parts, _: total_of(world, parts))],
    "reduce": [right_reduce, by_hand],
    "predicted": [seconds],
}


def given(gap, filling):
    return gap, filling, *([losses] if gap == "ragged" else [])


@pytest.mark.parametrize(("gap", "filling", "message"), marked(by_gap(WRONG), slow=WAITING))
def test_mistakes_of_lab_8(check, gap, filling, message):
    check_wrong(check, message, *given(gap, filling))


@pytest.mark.parametrize("gap", RIGHT)
def test_right_fillings(check, capsys, gap):
    for filling in RIGHT[gap]:
        check_right(check, capsys, *given(gap, filling))


def test_every_gap_is_tried_in_five_wrong_ways():
    check_tried(Check, WRONG)


@pytest.fixture(scope="module")
def lab():
    """The model and the batches of the solution."""
    (solution,) = paths.LABS.glob("8-solution-*.ipynb")
    functions = torch.nn.functional
    names = {"torch": torch, "END": text.END, "VOCABULARY": text.VOCABULARY, "LENGTH": 128}
    names |= {name: getattr(functions, name) for name in ("cross_entropy", "scaled_dot_product_attention")}
    for cell in jupytext.read(solution).cells:
        if cell.source.startswith(("def padded", "class Block")):
            exec(cell.source.partition("\nx, y = ")[0].partition("\nprint")[0], names)
    return names


def test_no_token_sees_those_behind_it(lab):
    """Nor padding."""
    model, tokens = lab["GPT"](), torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5:] = 7
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-5)
        assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:], atol=1e-5)


def test_a_batch_predicts_every_byte_and_the_end_once(lab):
    x, y = lab["padded"]([b"ab", b"wxyz", b"q"])
    assert x.tolist() == [[256, 97, 98, 256, 256], [256, 119, 120, 121, 122], [256, 113, 256, 256, 256]]
    assert y.tolist() == [[97, 98, 256, -100, -100], [119, 120, 121, 122, 256], [113, 256, -100, -100, -100]]


def test_the_library_s_pieces():
    train, valid = text.pieces(64, train=3000, valid=200)
    assert (len(train), len(valid)) == (3000, 200)
    assert (train, valid) == text.pieces(64, train=3000, valid=200)
    assert {len(piece) for piece in train} < set(range(1, 65))
    assert len({len(piece) for piece in train}) > 50
    assert sum(b"self" in piece for piece in train) > 50
    assert text.cut(b"a\nb\n\n  \nlonger than six\n c\nd\n\n\n", 6) == [b"a\nb", b"longer", b" c\nd"]


def test_what_a_model_has_written_cannot_steer_a_terminal():
    written = [256, *b"def f():\n\x1b[2J\r\x07", 0xFF, *"é".encode(), 256]
    assert text.shown(written) == "def f():\n\\x1b[2J\\r\\x07\ufffdé"
