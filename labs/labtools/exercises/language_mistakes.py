"""What is wrong with a gap of lab 8, in words, from what the ranks then have. None where it is right.

Each text continues "Gap 2, mean_per_token, ".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labtools.exercises import listed
from labtools.exercises.language_ranks import LENGTHS, Clipped, Means, Shares

_CLOSE = 1e-4
_LEAST_ERROR = 0.3  # nats a token by which a ragged batch has to show the mistake
EMPTY = "is still empty: it gives back nothing (if it computes something, a `return` is missing)."
Numbers = NDArray[Any]


def of_micro_batches(given: Mapping[tuple[int, int, int, int], Any]) -> str | None:
    """From the numbers given, by tokens, sequences, length and ranks."""
    ways: dict[str, Callable[..., float]] = {
        "that is as many as one rank alone would need: N ranks do N micro-batches at the same time": (
            lambda tokens, sequences, length, ranks: tokens / (sequences * length)
        ),
        "it is the number of sequences that an update has, on all ranks": (
            lambda tokens, sequences, length, ranks: tokens / length
        ),
        "it counts sequences where tokens are meant: a sequence has `length` of them": (
            lambda tokens, sequences, length, ranks: tokens / (sequences * ranks)
        ),
        "those are the tokens of all micro-batches that run at once": (
            lambda tokens, sequences, length, ranks: sequences * length * ranks
        ),
        "those are the tokens of a rank": lambda tokens, sequences, length, ranks: tokens / ranks,
        "it is multiplied by the ranks: more of them need fewer micro-batches each": (
            lambda tokens, sequences, length, ranks: tokens / (sequences * length) * ranks
        ),
        "it is turned around": lambda tokens, sequences, length, ranks: sequences * length * ranks / tokens,
    }
    if any(value is None for value in given.values()):
        return EMPTY
    for case, value in given.items():
        tokens, sequences, length, ranks = case
        right = tokens // (sequences * length * ranks)
        if not math.isclose(value, right):
            alike = (text for text, way in ways.items() if all(math.isclose(given[c], way(*c)) for c in given))
            return (
                f"gives {value:,.6g} where {ranks} ranks with {sequences} sequences of {length} each make an update of "
                f"{tokens:,} tokens, and {right} is right: {next(alike, 'compare the tokens of one step')}."
            )
        if not isinstance(value, int | np.integer):
            return f"gives {value!r}, and range() needs a whole number: // divides without a rest."
    return None


def of_means(found: Sequence[Means], case: Sequence[tuple[float, int]]) -> str | None:
    """From what each rank got back, and the sum and the count of each rank."""
    if error := _error(found):
        return f"stopped: {error}"
    given = [each.values[0] for each in found]
    if any(value is None for value in given):
        return EMPTY
    totals, counts = np.array(case, float).T
    return _of_full(given, totals, counts) if counts.all() else _of_no_token(given, totals.sum() / counts.sum())


def _of_full(given: Sequence[float], totals: Numbers, counts: Numbers) -> str | None:
    """From what each rank got back where all have tokens."""
    expected, means = totals.sum() / counts.sum(), totals / counts
    mistaken = {
        "gives every rank the mean over its own tokens": means,
        "takes the mean of the ranks' means, as though all had as many tokens": means.mean(),
        "adds up the ranks' means": means.sum(),
        "divides all ranks' losses by this rank's tokens alone": totals.sum() / counts,
        "divides this rank's losses by all ranks' tokens": totals / counts.sum(),
        "gives back the sum of the losses, which nothing divides": totals.sum(),
        "divides the mean of the ranks' sums by all ranks' tokens": totals.mean() / counts.sum(),
    }
    if np.allclose(given, expected, atol=_CLOSE):
        return None
    alike = (text for text, values in mistaken.items() if np.allclose(given, values, atol=_CLOSE))
    return (
        f"{next(alike, 'gives something else')}: {listed(given)} on ranks 0, 1, 2, where "
        f"{totals.sum():.0f} nats over {counts.sum():.0f} tokens are {expected:.2f}."
    )


def _of_no_token(given: Sequence[float], right: float) -> str | None:
    if np.allclose(given, right, atol=_CLOSE):
        return None
    return f"is right, but not where a rank has no token that counts: there it gives {listed(given)}, not {right:.2f}."


def of_ragged(ragged: Any) -> str | None:
    """From the texts of two ranks, before any loss is taken of them."""
    given = [ragged, *(ragged if isinstance(ragged, list | tuple) else ())]
    if any(each is ... or (isinstance(each, list | tuple) and ... in each) for each in given):
        return "is still empty: a list of texts for rank 0, and one for rank 1."
    if not isinstance(ragged, list | tuple) or len(ragged) != 2:
        return f"is {ragged!r:.60}, and not two lists, the texts of rank 0 and those of rank 1."
    for rank, texts in enumerate(ragged):
        if not isinstance(texts, list | tuple) or not texts:
            return f"has {texts!r:.60} for rank {rank}, and not a list of one or more texts."
        if wrong := [text for text in texts if not isinstance(text, str) or not text]:
            return f"has {wrong[0]!r:.60} for rank {rank}, where a text is wanted that has a character at least."
    return None


def of_losses(losses: Sequence[tuple[float, int]]) -> str | None:
    """From the sum of the losses and the tokens of each rank."""
    (first, few), (second, many) = losses
    exact, wrong = (first + second) / (few + many), (first / few + second / many) / 2
    if few == many:
        return f"has {few} tokens on each rank: then both means are the same, {exact:.2f}. Give one rank more of them."
    if abs(first / few - second / many) < _LEAST_ERROR:
        return (
            f"costs {first / few:.2f} a token on rank 0 and {second / many:.2f} on rank 1: alike, so that it hardly "
            "matters how they are weighed. Let one rank have what the model knows well, and the other what it does not."
        )
    if abs(exact - wrong) < _LEAST_ERROR:
        return (
            f"shows the mistake faintly: {wrong:.2f} in place of {exact:.2f}, with {few} and {many} tokens. "
            f"It should be apart by {_LEAST_ERROR} or more: make the lengths more unequal."
        )
    return None


def of_shares(found: Sequence[Shares]) -> str | None:
    """From each rank's gradient, and those of the sums over its micro-batches."""
    if error := _error(found):
        return f"stopped: {error}"
    left, sums = np.array([each.left for each in found]), np.array([each.of_sums for each in found])
    if not left.any():
        return "is still empty, or never calls backward(): no parameter has a gradient."
    widest = max(len(lengths) for rank in LENGTHS for lengths in rank)
    if any(each.most > widest for each in found):
        return (
            f"gives the model {max(each.most for each in found)} sequences at once, those of all micro-batches: "
            "then the memory has to hold the activations of all. One micro-batch after the other."
        )
    return _of_share(left, sums)


def _of_share(left: Numbers, sums: Numbers) -> str | None:
    """From the gradient of each rank [rank, n], and those of the sums over its micro-batches [rank, micro-batch, n]."""
    counts = np.array([[sum(lengths) for lengths in rank] for rank in LENGTHS], float)  # [rank, micro-batch]
    places = np.array([[len(lengths) * max(lengths) for lengths in rank] for rank in LENGTHS], float)
    of_rank, means = sums.sum(1), sums / counts[:, :, None]
    right, own = of_rank / counts.sum(), of_rank / counts.sum(1)[:, None]
    if np.allclose(left, right, atol=_CLOSE * np.abs(right).max()):
        return None
    mean = "takes the mean of micro-batches' means: a token of a short one then counts more than one of a long one."
    own_tokens = (
        "divides by this rank's tokens alone: a token of a rank that has few then counts more. "
        "The divisor is that of all ranks: world.sum of the counts."
    )
    all_up = "adds up the ranks' shares already: that is the next gap, once for all micro-batches."
    mistaken = (
        (means.mean(1), mean),
        (means.mean(1) / len(left), mean),
        (means.sum(1), "adds up the means of the micro-batches: as many times too large as there are micro-batches."),
        (own, own_tokens),
        (own / len(left), own_tokens),
        (of_rank, "divides by nothing: a gradient of the sum, which grows with the number of tokens."),
        (of_rank / places.sum(), "counts the padding too: only the targets that are not -100 count."),
        (of_rank / counts[:, -1:], "divides by the tokens of the last micro-batch alone."),
        (sums[:, -1] / counts.sum(), "keeps the last micro-batch alone: the gradients of the others were cleared."),
        (sums[:, 0] / counts.sum(), "stops after the first micro-batch."),
        (np.broadcast_to(right.sum(0), right.shape), all_up),
        (np.broadcast_to(right.mean(0), right.shape), all_up),
    )
    for values, what in mistaken:
        if np.allclose(left, values, atol=_CLOSE * np.abs(values).max()):
            return what
    factor = float(left.ravel() @ right.ravel() / (right.ravel() @ right.ravel()))
    if np.allclose(left, factor * right, atol=_CLOSE * np.abs(left).max()):
        return f"is {factor:.3g} times what it should be: divide the sum by the tokens of all ranks, once."
    return "leaves another gradient than that of the sum of the losses, divided by the tokens of all ranks."


def of_clipped(found: Sequence[Clipped], most: Sequence[float]) -> str | None:
    """From the gradients and norms of each rank in each case: a norm to which they were to be clipped, and one that
    they were below."""
    if error := _error(found):
        return f"stopped: {error}"
    shares = np.array([each.shares[0] for each in found])
    large, small = (np.array([each.left[case] for each in found]) for case in range(2))
    if np.array_equal(large, shares) and np.array_equal(small, shares):
        return "is still empty: every rank still has its share alone."
    if np.ptp(small, axis=0).max() > _CLOSE * np.abs(shares).max():
        return (
            "leaves each rank a gradient of its own, so that the ranks' weights part: world.sum(parameter.grad) is the "
            "sum over the ranks, which has to be put in its place."
        )
    return (
        _of_small(small[0], shares.sum(0), most[1], len(found))
        or _of_large(large, shares, most[0], found[0].sizes)
        or _of_norms([each.norms[0] for each in found], float(np.linalg.norm(shares.sum(0))))
    )


def _of_norms(given: Sequence[Any], norm: float) -> str | None:
    if any(value is None for value in given):
        return "clips, but gives back no norm: a `return` is missing."
    if np.allclose(given, norm, rtol=1e-3):
        return None
    own = " That is the norm of this rank's share." if np.ptp(given) > _CLOSE else ""
    return (
        f"gives back {listed([float(each) for each in given])}, where the gradient had the norm {norm:.2f} before it "
        f"was clipped.{own}"
    )


def _of_small(left: Numbers, total: Numbers, most: float, size: int) -> str | None:
    """Where the norm is below the limit, and the gradient the sum as it is."""
    norm = float(np.linalg.norm(total))
    if np.allclose(left, total, atol=_CLOSE * norm):
        return None
    if np.allclose(left, total / size, atol=_CLOSE * norm):
        return (
            f"takes the mean of the {size} shares: each was divided by the tokens of all ranks, so their sum is "
            "the gradient."
        )
    if np.isclose(np.linalg.norm(left), most, rtol=1e-3):
        return f"makes a small gradient larger: its norm is {norm:.1f}, below the limit, and it stays as it is."
    return f"changes a gradient of norm {norm:.1f}, which is below the limit {most:.0f}: there it is the sum as it is."


def _of_large(left: Numbers, shares: Numbers, most: float, sizes: Sequence[int]) -> str | None:
    """Where the norm is above the limit; `left` [rank, n]."""
    total, cuts = shares.sum(0), np.cumsum(sizes)[:-1]
    norm = float(np.linalg.norm(total))

    def shortened(gradient: Numbers, limit: float = most) -> Numbers:
        return gradient * min(1.0, limit / float(np.linalg.norm(gradient)))

    right, first = shortened(total), np.array([shortened(share) for share in shares])
    mistaken = (
        (total, f"does not clip: the gradient has the norm {norm:.1f} still, and {most:g} is the limit."),
        (
            first.sum(0),
            "clips each rank's share, and adds them up then: the ranks shorten theirs by different factors, so that "
            "the sum points elsewhere, and depends on the number of ranks. First the sum, then its norm.",
        ),
        (
            np.concatenate([shortened(each) for each in np.split(total, cuts)]),
            "clips each tensor by itself: that changes the direction. The norm is that of all gradients together.",
        ),
        (
            np.clip(total, -most, most),
            "cuts off single numbers: that changes the direction. The norm of all is what is limited.",
        ),
        (total * min(1.0, most / norm**2), "forgets the root: it divides by the square of the norm."),
    )
    if np.allclose(left, right, atol=1e-3 * most):
        return None
    if np.ptp(left, axis=0).max() > _CLOSE * most:
        return (
            "shortens the gradient by another factor on each rank: the norm has to be that of the sum, which all ranks "
            "have alike, and not that of this rank's share."
        )
    for values, what in mistaken:
        if np.allclose(left[0], values, atol=1e-3 * most):
            return what
    return f"leaves a gradient of norm {np.linalg.norm(left[0]):.2f}, where {most:g} is the limit."


def of_predicted(given: Mapping[tuple[Any, ...], Any]) -> str | None:
    """From the seconds given, by ranks, micro-batches, seconds of one, seconds of the sum, and cores."""
    if any(value is None for value in given.values()):
        return EMPTY
    ways: dict[str, Callable[..., float]] = {
        "it adds the gradients up after each micro-batch; they are added up once, after the last": (
            lambda n, k, micro, add, cores: k / min(n, cores) * (micro + 2 * (n - 1) / n * add)
        ),
        "it lets every rank do all micro-batches: they share them": (
            lambda n, k, micro, add, cores: k * micro + 2 * (n - 1) / n * add
        ),
        "it forgets that ranks share cores: no more than `cores` of them compute at a time": (
            lambda n, k, micro, add, cores: k / n * micro + 2 * (n - 1) / n * add
        ),
        "it adds gradients up on one rank too, which has nobody to add to": (
            lambda n, k, micro, add, cores: k / min(n, cores) * micro + add
        ),
        "it forgets what adding up takes": lambda n, k, micro, add, cores: k / min(n, cores) * micro,
        "the ring's part is 2 (N - 1) / N of `adding`, and not N - 1 of it": (
            lambda n, k, micro, add, cores: k / min(n, cores) * micro + (n - 1) * add
        ),
        "the ring's part is (N - 1) / N of `adding`, twice: there are two phases": (
            lambda n, k, micro, add, cores: k / min(n, cores) * micro + (n - 1) / n * add
        ),
    }
    for case, value in given.items():
        n, k, micro, add, cores = case
        right = k / min(n, cores) * micro + 2 * (n - 1) / n * add
        if not math.isclose(value, right, rel_tol=1e-6):
            alike = (
                text for text, way in ways.items() if all(math.isclose(given[c], way(*c), rel_tol=1e-6) for c in given)
            )
            return (
                f"gives {value:.3g} s for {k} micro-batches of {micro:g} s on {n} rank{'s' * (n > 1)} with {cores:g} "
                f"cores, where adding takes {add:g} s, and {right:.3g} is right: "
                f"{next(alike, 'computing, shared by those that compute at a time, and the ring once')}."
            )
    return None


def _error(found: Sequence[Means | Shares | Clipped]) -> str:
    """The line with which a rank ended that was not ended by another."""
    errors = [each.error for each in found if each.error]
    return next((each for each in errors if not each.startswith("Aborted")), next(iter(errors), ""))
