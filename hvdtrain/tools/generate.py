"""`python -m hvdtrain generate RUN --prompt TEXT`: how the language model of a run's checkpoint continues a text."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset, tokens
from hvdtrain.engines.frameworks import require
from hvdtrain.errors import OutputError, RecipeError
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.reader import SAMPLES
from hvdtrain.terminal import Status
from hvdtrain.tools.export import chosen, recipe_and_data, torch_model
from hvdtrain.untrusted import printable

LONGEST_LINE = 10_000
GIVEN, KEPT, SECONDS = 32, 3, 10.0
"""Tokens of a prompt that nobody gave; texts for a report, and the seconds after which each ends."""
Logits = Callable[[list[int]], NDArray[np.float64]]
"""Gives the logits [vocabulary] of the token that follows so many tokens, of which a model sees the last ones."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Continues a text by the model of a run's newest checkpoint, until the document ends. The same seed gives the same
    text."""

    run: Annotated[Path, Flag(help="run folder, as runs/text/2026-11-20_15-33-02", is_positional=True)]
    prompt: Annotated[
        Annotated[str, Field(min_length=1, max_length=100_000)] | None,
        Flag(f"the text to continue; left out: the first {GIVEN} tokens of the validation set"),
    ] = None
    tokens: Annotated[Annotated[int, Field(gt=0, le=100_000)], Flag("the most tokens to add")] = 200
    temperature: Annotated[Annotated[float, Field(gt=0, le=100)], Flag("below 1 for likelier tokens")] = 1.0
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**63)], Flag("of the draws")] = 0
    best: Annotated[bool, Flag("the checkpoint that was best in validation; left out: the newest")] = False
    keep: Annotated[bool, Flag(f"write {KEPT} texts into the run folder, whose report shows them; print none")] = False


def main(argv: Sequence[str]) -> int:
    """Prints the prompt and what follows it. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain generate", argv)
    state = chosen(options.run, best=options.best)
    require(framework := str(state.meta.get("framework")), "generate")
    recipe, dataset = recipe_and_data(options.run, state)
    if not dataset.text:
        raise RecipeError(f"{options.run} was trained on {recipe.dataset}, which is no text; give another run.")
    with Status("generating"):
        logits = (_of_torch if framework == "torch" else _of_tensorflow)(recipe, dataset, state)
        if options.prompt:
            ids = tokens.encode(dataset.text, options.prompt)
        else:
            ids = dataset.valid.read(np.arange(1), None)[0][0, :GIVEN].tolist()
        if options.keep:
            drawn = (continued(logits, ids, options, dataset.text.end, number) for number in range(KEPT))
            texts = [tokens.decode(dataset.text, each) for each in (ids, *map(_in_time, drawn))]
            about = {"step": state.meta["step"], "temperature": options.temperature, "seed": options.seed}
            about |= {"prompt": texts[0], "texts": texts[1:]}
            try:
                files.write(options.run / SAMPLES, json.dumps(about))
            except OSError as error:
                shown = printable(str(options.run / SAMPLES), 200)
                raise OutputError(f"cannot write {shown}: {error.strerror}; leave out --keep.") from None
            return 0
        ids += continued(logits, ids, options, dataset.text.end)
    for line in tokens.decode(dataset.text, ids).split("\n"):
        print(printable(line, LONGEST_LINE))
    return 0


def _in_time(drawn: Iterator[int]) -> list[int]:
    end = time.monotonic() + SECONDS
    return list(itertools.takewhile(lambda _: time.monotonic() < end, drawn))


def continued(logits: Logits, ids: Sequence[int], options: Options, end: int | None, number: int = 0) -> Iterator[int]:
    """The tokens that are drawn to follow these, before the first that is `end`; another `number`, other draws."""
    draw, seen = np.random.default_rng(options.seed + number), [*ids]
    for _ in range(options.tokens):
        scaled = logits(seen) / options.temperature
        summed = np.exp(scaled - scaled.max()).cumsum()
        seen.append(int(np.searchsorted(summed, draw.random() * summed[-1], side="right")))
        if seen[-1] == end:
            return
        yield seen[-1]


def _of_torch(recipe: Recipe, dataset: Dataset, state: Checkpoint) -> Logits:
    import torch

    from hvdtrain.torch.state import weights

    _, model = torch_model(recipe, dataset, weights(state)[0])

    @torch.inference_mode()
    def logits(ids: list[int]) -> NDArray[np.float64]:
        outputs: Any = model(torch.tensor([ids[-recipe.sequence_length :]]))
        return outputs[0, -1].double().numpy()  # type: ignore[no-any-return]

    return logits


def _of_tensorflow(recipe: Recipe, dataset: Dataset, state: Checkpoint) -> Logits:
    from hvdtrain.tensorflow import without_banner

    with without_banner():
        import tensorflow as tf

        from hvdtrain.tensorflow import models
        from hvdtrain.tensorflow.state import set_weights

    model = models.build(recipe, dataset, None)
    set_weights(model, state)
    compute = tf.function(model)

    def logits(ids: list[int]) -> NDArray[np.float64]:
        seen = ids[-recipe.sequence_length :]
        filled = np.zeros((1, recipe.sequence_length), np.int64)  # whose end no earlier token sees
        filled[0, : len(seen)] = seen
        outputs: Any = compute(tf.constant(filled), training=False)
        return outputs[0, len(seen) - 1].numpy().astype(np.float64)  # type: ignore[no-any-return]

    return logits
