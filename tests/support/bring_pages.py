"""The pages on bringing one's own model as one text, in the order in which a reader meets them."""

from paths import REPOSITORY

KEEP, OTHERS, TAKE = "## Keep your loop", "## Keep Lightning's loop", "## Take the model away"


def text() -> str:
    bring, model, loop = ((REPOSITORY / f"docs/{name}.md").read_text() for name in ("bring", "model", "loop"))
    of_recipe, _, rest = bring.partition(KEEP)
    return "\n".join([of_recipe, model, KEEP, rest.partition(OTHERS)[0], loop, TAKE, rest.partition(TAKE)[2]])
