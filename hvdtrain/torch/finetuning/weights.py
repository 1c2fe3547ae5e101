"""Gives a recipe's network the weights that `init_from` names."""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain import files
from hvdtrain.core.recipe import Recipe
from hvdtrain.errors import CheckpointError
from hvdtrain.ranks.stacks import takes_long
from hvdtrain.run import weights
from hvdtrain.torch import state
from hvdtrain.untrusted import printable

WITHIN = ("state_dict", "model_state_dict", "model")
"""Where a file of torch.save may have the state_dict beside an optimizer and numbers."""


@takes_long
def start(recipe: Recipe, model: nn.Module) -> str:
    """Gives the network the weights that `init_from` names. Returns a line for the log. Rank 0 alone calls it.

    Raises HvdtrainError where the file cannot be read, or does not fit the network.
    """
    source = files.expanded(str(recipe.init_from), "init_from")
    with weights.explained(source), torch.no_grad():
        found, where = _found(source)
        live = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
        first: dict[Any, str] = {}
        keys = {
            name: (each.data_ptr(), each.shape, each.stride()) if each.numel() else name for name, each in live.items()
        }
        also = {name: first[key] for name, key in keys.items() if first.setdefault(key, name) != name}
        own = {name: each for name, each in live.items() if name not in also}
        taken = weights.assigned(recipe, _described(own), _described(found), also)
        for name, there in taken.items():
            own[name].copy_(found[there])
    return weights.line(taken, own, where)


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The kind and shape of each tensor: one of another kind is no weight of the same meaning."""

    def kind(each: torch.Tensor) -> str:
        is_plain = each.layout == torch.strided and not each.is_quantized and not each.is_meta
        if is_plain and each.dtype.is_floating_point:
            return "float"
        return str(each.dtype).removeprefix("torch.") if is_plain else f"{each.dtype} {each.layout}"

    return {name: f"{kind(each)} {list(each.shape)}" for name, each in tensors.items()}


def _found(source: str) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors by name, and where they are from, in words."""
    library, _, name = source.partition(":")
    path = _cached(library, name) if source.startswith(weights.LIBRARIES["torch"]) else Path(source)
    shown = printable(str(path), 200)
    if ours := weights.checkpoint_of(source, "torch"):
        found, which = state.weights(ours[0])
        return {key: each for key, each in found.items() if isinstance(each, torch.Tensor)}, f"the {which} of {ours[1]}"
    if path.suffix == ".safetensors":
        return weights.safetensors(path, "pt"), shown
    with weights.opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on how the file was written
        if zipfile.is_zipfile(file):
            _refuse_bombs(file)
        file.seek(0)
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            code = re.search(r"GLOBAL ([\w.]+)", str(error))
            if not code:
                raise ValueError("it is no plain state_dict") from None
            raise CheckpointError(
                f"init_from {shown} names code, {code[1]}, which is not run: it is no state_dict, maybe a whole model; "
                "write its weights alone where it was made: torch.save(model.state_dict(), FILE)."
            ) from None
    return _state_dict(found, shown), shown


def _refuse_bombs(file: Any) -> None:
    """Raises ValueError for an archive whose content is larger than the file: PyTorch compresses nothing."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    size = os.fstat(file.fileno()).st_size
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError("its archive is compressed, which no file of torch.save is")


def _state_dict(found: Any, shown: str) -> dict[str, torch.Tensor]:
    for key in WITHIN:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    is_one = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)} if is_one else {}
    if not tensors:
        keys = ", ".join(map(str, [*found][:10])) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise CheckpointError(
            f"init_from {shown} holds no state_dict, which maps names to tensors, by itself or within "
            f"{', '.join(WITHIN)}, but {printable(keys, 200)}; write the state_dict alone: torch.save(..., FILE)."
        )
    return tensors


def _cached(library: str, name: str) -> Path:
    """The file of a library's published weights, which lies in its folder already. Raises CheckpointError."""
    try:
        if library == "torchvision":
            from torchvision import models

            kind = models.get_weight(name) if "." in name else models.get_model_weights(name).DEFAULT
            repo, urls = "", [kind.url]
        else:
            from timm.models import get_pretrained_cfg

            if not (known := get_pretrained_cfg(name)):
                raise ValueError("timm has no weights of that name")
            repo, urls = known.hf_hub_id or "", [known.url] if known.url else []
    except (ImportError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"init_from {library}:{printable(name)}: {printable(str(error), 200)}.") from None
    wanted = [Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2] for url in urls]
    if repo:
        from huggingface_hub import constants, try_to_load_from_cache

        hits = [try_to_load_from_cache(repo, file) for file in ("model.safetensors", "pytorch_model.bin")]
        folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
        wanted = [
            *(Path(hit) for hit in hits if isinstance(hit, str)),
            *wanted,
            folder / "snapshots/*/model.safetensors",
        ]
    if there := next((path for path in wanted if path.exists()), None):
        return there
    remedy = (
        f"python -c 'import timm; timm.create_model(\"{name}\", pretrained=True)'" if repo else f"curl -O {urls[0]}"
    )
    raise CheckpointError(
        f"init_from {library}:{printable(name)} is not on this host: {wanted[-1]} is missing, and a run downloads "
        f"nothing; fetch it where there is a network, by {remedy}, and put it there, or set TORCH_HOME or HF_HOME."
    )
