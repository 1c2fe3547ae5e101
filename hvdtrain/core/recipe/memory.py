"""The keys of a recipe about memory."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from hvdtrain.core.values import Text
from hvdtrain.errors import RecipeError

BLOCKS = "true"
"""The pattern that stands for the network's repeated blocks."""


def _as_patterns(given: Any) -> Any:
    return () if given in (None, False) else (BLOCKS,) if given is True else given


class Memory(BaseModel):
    """What a step may do to fit into memory."""

    checkpoint_activations: Annotated[
        tuple[Text, ...], BeforeValidator(_as_patterns), Field(strict=False, max_length=100)
    ] = Field(
        (),
        description="PyTorch: modules whose activations are computed again in backward and not kept: true for the "
        "network's repeated blocks, or patterns of names, as encoder.layers.*",
    )

    fit_memory: bool = Field(
        False,
        description="PyTorch: where a micro-batch does not fit into a rank's memory, halve those of all ranks and make "
        "the step again, of the same samples",
    )


def check(r: Any) -> None:
    """Raises RecipeError where a key does not go with another one."""
    if r.checkpoint_activations and r.compile:
        raise RecipeError(
            "checkpoint_activations goes without compile, which does not keep what forward writes into buffers from "
            "being written again; drop one."
        )
    against = {
        "compile": r.compile,
        "batch_norm sync": r.batch_norm == "sync",
        "reduction adasum": r.reduction == "adasum",
    }
    if r.fit_memory and (other := next((key for key, is_set in against.items() if is_set), None)):
        raise RecipeError(f"fit_memory goes without {other}, which does not let ranks leave a step together; drop one.")
