"""Puts nanoGPT's model.py (Andrej Karpathy, MIT licence) into this folder: python fetch.py [COPY]

COPY is a local copy, for a machine without network. What is not the pinned file is refused.
"""

import hashlib
import sys
import urllib.request
from pathlib import Path

COMMIT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
URL = f"https://raw.githubusercontent.com/karpathy/nanoGPT/{COMMIT}/model.py"
SHA256 = "7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c"
MODEL = Path(__file__).with_name("model.py")


def fetch(copy: str | None = None) -> None:
    """Writes MODEL. Raises OSError where it cannot be read, SystemExit where it is another file."""
    if copy:
        content = Path(copy).read_bytes()
    else:
        with urllib.request.urlopen(URL, timeout=10) as answer:
            content = answer.read(2**20)
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{copy or URL} is not nanoGPT's model.py of commit {COMMIT[:7]}: its SHA-256 is {found}.")
    MODEL.write_bytes(content)


if __name__ == "__main__":
    fetch(*sys.argv[1:])
