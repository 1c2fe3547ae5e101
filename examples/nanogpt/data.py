"""The Python Language Reference, byte by byte: it ships with Python, as the text of help()."""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset


class Windows(Dataset):
    """Stretches of `length` + 1 bytes of a text, side by side: {"tokens": [length], "targets": [length]}."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * self.length : (index + 1) * self.length + 1]
        return {"tokens": window[:-1], "targets": window[1:]}


def load(length: int = 64, characters: int | None = None) -> tuple[Windows, Windows]:
    """The training set and, of the last tenth of the text, the validation set."""
    text = "".join(topics[name] for name in sorted(topics))[:characters]
    tokens = torch.tensor(list(text.encode("ascii", "replace")))
    cut = len(tokens) * 9 // 10
    return Windows(tokens[:cut], length), Windows(tokens[cut:], length)
