"""The keys of text: how a file of tokens becomes examples."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from hvdtrain.core.user_code import is_path
from hvdtrain.errors import RecipeError

TOKENS, GPT = "tokens", "gpt"
HOW = {
    "packed": "whatever documents lie in them",
    "separate": "attention stays inside a document",
    "padded": "each a document, or a piece of one; what pads shorter ones does not count",
}


class Text(BaseModel):
    """Text as examples of tokens."""

    sequence_length: Annotated[int, Field(gt=0, le=2**20)] = Field(
        256, description="tokens: how many of an example are predicted"
    )
    sequences: Literal["packed", "separate", "padded"] = Field(
        "packed",
        description="tokens; packed: windows of the file; separate: too, attention stays inside a document; padded: "
        "a document, or a piece of it, is an example",
    )
    token_dtype: Literal["uint16", "uint32"] | None = Field(
        None, description="tokens: type of a data_dir's bare .bin files, as nanoGPT writes them, without a .json"
    )


def check(r: Any) -> None:
    """Raises RecipeError where a key does not go with the others."""
    if not is_path(r.model) and (r.model == GPT) != (r.dataset == TOKENS):
        raise RecipeError(f"model {r.model} cannot learn dataset {r.dataset}: gpt goes with tokens only.")
    if r.sequences == "separate" and r.model != GPT:
        raise RecipeError(f"sequences separate is what model gpt does, got {r.model}; take packed, and mask there.")
    if r.token_dtype and not r.data_dir:
        raise RecipeError("token_dtype is of the .bin files in a data_dir; give one.")


def lines(r: Any, examples: int) -> list[str]:
    """What the plan says of it, for batches of so many examples."""
    if r.dataset != TOKENS:
        return []
    of = f"{examples:,} examples of {r.sequence_length:,}"
    return [f"tokens      {examples * r.sequence_length:,} a step, {of}; {r.sequences}: {HOW[r.sequences]}"]
