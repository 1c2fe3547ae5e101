"""The keys of text: how a file of tokens becomes examples."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from hvdtrain.core.user_code import is_path
from hvdtrain.errors import PlanError, RecipeError

TOKENS, GPT = "tokens", "gpt"
Tokens = Annotated[int, Field(gt=0, le=10**18)]
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
    warmup_tokens: Tokens | None = Field(None, description="tokens: instead of warmup_epochs")
    decay_tokens: Tokens | None = Field(
        None, description="tokens, lr_schedule cosine: after so many of them it has ended; left out: after all epochs"
    )


def check(r: Any) -> None:
    """Raises RecipeError where a key does not go with the others."""
    if not is_path(r.model) and (r.model == GPT) != (r.dataset == TOKENS):
        raise RecipeError(f"model {r.model} cannot learn dataset {r.dataset}: gpt goes with tokens only.")
    if r.sequences == "separate" and r.model != GPT:
        raise RecipeError(f"sequences separate is what model gpt does, got {r.model}; take packed, and mask there.")
    if given := [key for key in ("warmup_tokens", "decay_tokens") if getattr(r, key)]:
        if r.dataset != TOKENS or r.sequences == "padded":
            what = f"sequences {r.sequences}" if r.dataset == TOKENS else f"dataset {r.dataset}"
            raise RecipeError(f"{given[0]} goes with dataset tokens, packed or separate, got {what}; count epochs.")
        if r.warmup_tokens and r.warmup_epochs:
            raise RecipeError("the warm-up must be given once: warmup_tokens or warmup_epochs.")
        if r.decay_tokens and r.lr_schedule != "cosine":
            raise RecipeError(f"decay_tokens is the end of lr_schedule cosine, got {r.lr_schedule}; drop it.")
    if r.token_dtype and not r.data_dir:
        raise RecipeError("token_dtype is of the .bin files in a data_dir; give one.")


def warmup_and_end(r: Any, examples: int) -> tuple[float, float]:
    """How many epochs of `examples` the warm-up takes, and after how many cosine has ended. Raises PlanError."""
    tokens = examples * r.sequence_length
    warmup = r.warmup_tokens / tokens if r.warmup_tokens else r.warmup_epochs
    end = r.decay_tokens / tokens if r.decay_tokens else r.epochs
    if warmup > end:
        raise PlanError(
            f"the warm-up must end before the decay does, after {end * tokens:,.0f} tokens, got "
            f"{warmup * tokens:,.0f}; give a smaller warmup_tokens, or more epochs."
        )
    return warmup, end


def lines(r: Any, examples: int) -> list[str]:
    """What the plan says of it, for batches of so many examples."""
    if r.dataset != TOKENS:
        return []
    of = f"{examples:,} examples of {r.sequence_length:,}"
    return [f"tokens      {examples * r.sequence_length:,} a step, {of}; {r.sequences}: {HOW[r.sequences]}"]
