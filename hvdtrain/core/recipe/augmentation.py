"""The keys for the augmentation of training images beside crop and flip."""

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from hvdtrain.core.recipe.keys import CROSS_ENTROPIES
from hvdtrain.core.user_code import is_path
from hvdtrain.core.wording import counted
from hvdtrain.datasets import Dataset
from hvdtrain.datasets.augment import DRAWS, Augmenter
from hvdtrain.datasets.operations import MAGNITUDES, Policy
from hvdtrain.errors import PlanError, RecipeError

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

Alpha = Annotated[float, Field(ge=0, le=1000)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Augmentation(BaseModel):
    """Augmentation of training images, by numbers that are drawn for each example."""

    augment: Policy = Field(
        "none", description="training images: operations as torchvision's RandAugment or TrivialAugmentWide has them"
    )
    augment_ops: Annotated[int, Field(gt=0, le=10)] = Field(2, description="randaugment: operations on an image")
    augment_magnitude: Annotated[int, Field(ge=0, lt=MAGNITUDES)] = Field(
        9, description="randaugment: how much they change, 0 to 30"
    )
    augment_repeats: Annotated[int, Field(gt=0, le=100)] = Field(
        1, description="repeated augmentation: how often an example comes in an epoch, which has that part of them"
    )
    mixup: Alpha = Field(
        0.0, description="training images, alpha: pairs are blended, and their labels; 0: none. With cutmix one of both"
    )
    cutmix: Alpha = Field(0.0, description="training images, alpha: pairs exchange a box, and shares of labels")
    random_erasing: Probability = Field(0.0, description="training images: how often a box gets the mean colour")


def mixes(r: "Recipe") -> bool:
    """Whether pairs of training images are mixed, so that targets are each class's share."""
    return bool(r.mixup or r.cutmix)


def augmenter(r: "Recipe", dataset: Dataset) -> Augmenter | None:
    """What augments the training images; None where no key asks for it."""
    if not _asked_for(r):
        return None
    fill = tuple(round(255 * mean) for mean in dataset.mean)
    operations = r.augment, r.augment_ops, r.augment_magnitude
    return Augmenter(dataset.draws, dataset.classes or 0, fill, r.mixup, r.cutmix, r.random_erasing, *operations)


def draws(r: "Recipe", dataset: Dataset) -> int:
    """How many uniform numbers augment each training example. Raises PlanError where it is no image of a class."""
    if r.augment_repeats > 1 and dataset.items:
        raise PlanError("augment_repeats needs examples by number, which a PyDataset has not; give arrays or a source.")
    key = _asked_for(r)
    is_known = getattr(dataset.train, "labels", ()) is not None
    if key and is_known and (dataset.classes is None or len(dataset.sample_shape) != 3):
        raise PlanError(
            f"{key} needs images of classes, uint8 [n, height, width, 3], which {dataset.name} does not say that it "
            "has; augment in its __getitem__, or return an hvdtrain Dataset."
        )
    return dataset.draws + DRAWS * bool(key)


def check(r: "Recipe") -> None:
    """Raises RecipeError where a key for augmentation does not go with the others."""
    key = _asked_for(r)
    if r.augment_repeats > 1 and (r.sample == "balanced" or r.shuffle == "shards"):
        other = "sample balanced" if r.sample == "balanced" else "shuffle shards"
        raise RecipeError(f"augment_repeats and {other} are two orders of the examples; drop one.")
    if (key or r.augment_repeats > 1) and r.dataset == "linear":
        key = key or "augment_repeats"
        raise RecipeError(f"{key} is for images, which dataset linear has not; drop it.")
    if r.augment != "none" and r.data_on_device:
        raise RecipeError(f"augment {r.augment} is computed by readers on the host; drop it, or data_on_device.")
    takes_shares = not r.step and (r.loss in {None, *CROSS_ENTROPIES, "bce_with_logits"} or is_path(str(r.loss)))
    if mixes(r) and not takes_shares:
        raise RecipeError(
            f"{'mixup' if r.mixup else 'cutmix'} makes targets of shares of classes, for loss cross_entropy or "
            f"bce_with_logits, got {f'step {r.step}' if r.step else f'loss {r.loss}'}; drop one."
        )


def _asked_for(r: "Recipe") -> str:
    """The first key that is given and changes pixels."""
    given = {"augment": r.augment != "none", "mixup": r.mixup, "cutmix": r.cutmix, "random_erasing": r.random_erasing}
    return next((key for key, is_given in given.items() if is_given), "")


def lines(r: "Recipe", examples: int) -> list[str]:
    """How training images are augmented, for the plan, of so many training examples."""
    pairs = [f"{name} (alpha {alpha:g})" for name, alpha in (("mixup", r.mixup), ("cutmix", r.cutmix)) if alpha]
    steps = {
        "none": [],
        "randaugment": [f"randaugment, {counted(r.augment_ops, 'operation')} at magnitude {r.augment_magnitude} of 30"],
        "trivialaugment": ["trivialaugment, one operation at any magnitude"],
    }[r.augment]
    if r.random_erasing:
        steps.append(f"a box is erased in {r.random_erasing:.4g} of the images")
    if pairs:
        steps.append(
            f"{' or '.join(pairs)} of examples 2k and 2k + 1 of the global batch; acc1 of training counts "
            "the class of the larger share"
        )
    if r.augment_repeats > 1:
        part = counted(-(-examples // r.augment_repeats), "example")
        steps.append(f"an epoch has {part}, each {r.augment_repeats} times, augmented anew")
    return [f"augments    {'; '.join(steps)}"] if steps else []
