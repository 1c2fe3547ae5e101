"""What a build changes in Horovod's source: patches and new files, and how they are applied.

A file in patches/ has the headers Subject, Reason and Upstream, an empty line, and a diff as git makes it. The patches
are all applied, in the order of their numbers: what one framework or GPU needs has its condition in the changed file.
`make horovod-source` and `make patches` edit them with git. A file in sources/ is new, with the same path in Horovod.
"""

import email
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import BuildError

PATCHES = Path(__file__).with_name("patches")
SOURCES = Path(__file__).with_name("sources")
SUFFIXES = (".h", ".py")  # of sources: pip leaves bytecode in their folder too

PACKAGE = Path(__file__).parents[2]
SHARED = {
    "keras/averaging.py": "horovod/_keras/averaging.py",
    "keras/batch_norm.py": "horovod/_keras/batch_norm.py",
    "keras/horovod_names.py": "horovod/_keras/horovod_names.py",
    "tensorflow/moments.py": "horovod/_keras/moments.py",
}
"""Modules of this package that Horovod gets too, with these changes."""
IN_HOROVOD = {
    "from hvdtrain.errors import KerasError\n": "KerasError = ValueError\n",
    "from hvdtrain.tensorflow.engines.horovod import hvd\n": "import horovod.tensorflow as hvd\n",
    "from hvdtrain.tensorflow.moments ": "from horovod._keras.moments ",
    "from hvdtrain.keras.": "from horovod._keras.",
    '(package="hvdtrain")': '(package="horovod")',
    "import hvdtrain.keras as hvd": "import horovod.tensorflow as hvd",
}

# Neither accepts lines that are merely similar, nor changes line ends; patch leaves no backups.
PROGRAMS = {
    "patch": ("-p1", "--batch", "--forward", "--fuzz=0", "--no-backup-if-mismatch"),
    "git": ("-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"),
}
FAILED_FILE = re.compile(r"rejects to file (.+)\.rej|^\|\+\+\+ b/(.+)|^error: (.+): (?:patch does not|No such)", re.M)

COMMENTS = {".py": "#", ".txt": "#", ".cmake": "#"}
"""What begins a comment, by a file's suffix; // in all others, which are C++ and CUDA."""


@dataclass(frozen=True)
class Patch:
    """A change of Horovod: its subject, its reason, where Horovod's developers discuss it, and the diff."""

    name: str
    subject: str
    reason: str
    upstream: str
    diff: str

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the changed files in Horovod's source."""
        return tuple(re.findall(r"^\+\+\+ b/(.+)$", self.diff, re.M))


def digest() -> str:
    """Eight hexadecimal digits that change with any diff or new file, but not with a patch's headers."""
    return hashlib.sha256(repr(([patch.diff for patch in every()], sources())).encode()).hexdigest()[:8]


def sources() -> dict[str, str]:
    """The texts of the new files that Horovod gets, by their paths in Horovod."""
    paths = sorted(path for path in SOURCES.rglob("*") if path.suffix in SUFFIXES)
    texts = {str(path.relative_to(SOURCES)): path.read_text() for path in paths}
    for shared, path in SHARED.items():
        texts[path] = (PACKAGE / shared).read_text()
        for ours, horovods in IN_HOROVOD.items():
            texts[path] = texts[path].replace(ours, horovods)
    return texts


def every() -> tuple[Patch, ...]:
    """All patches, in order."""
    return tuple(parse(path.stem, path.read_text()) for path in sorted(PATCHES.glob("*.patch")))


def parse(name: str, text: str) -> Patch:
    """The patch that a file's text holds."""
    message = email.message_from_string(text)
    subject, reason, upstream = (" ".join(message[header].split()) for header in ("Subject", "Reason", "Upstream"))
    return Patch(name, subject, reason, upstream, str(message.get_payload()))


def program(environ: Mapping[str, str]) -> str:
    """The path of the program that applies patches here. Raises BuildError where there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name, path=environ.get("PATH")):
            return found
    raise BuildError("no patch and no git found: install one, as with `apt install patch` or `conda install patch`.")


def add_sources(root: Path) -> None:
    """Adds the new files to the source tree. Raises BuildError where one of them is there already."""
    for name, text in sources().items():
        path = root / name
        if path.exists():
            raise BuildError(f"{path.relative_to(root)} is in Horovod already: build the pinned version.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def apply(root: Path, patches: Sequence[Patch], program: str) -> None:
    """Applies the patches to the source tree, in order.

    Raises BuildError, with the patch and the file, where one does not apply exactly; the tree then has the patches
    before it and is of no use.
    """
    # Inside a repository git takes paths from its top, and silently skips what is not there.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    for patch in patches:
        argv = [program, *PROGRAMS[Path(program).name]]
        ran = subprocess.run(argv, input=patch.diff, cwd=root, env=environ, capture_output=True, text=True, check=False)
        if ran.returncode:
            failed = FAILED_FILE.search(ran.stdout + ran.stderr)
            file = next(filter(None, failed.groups())) if failed else " ".join(ran.stderr.split())
            raise BuildError(
                f"patch {patch.name} does not apply to {file}: "
                "this is not the source that it was made for; build the pinned version."
            )


def state_changes(root: Path, patches: Sequence[Patch]) -> None:
    """Makes each file that these patches have changed say so in its first line, as Horovod's license requires (4b). In
    a script that is the second line. No patch applies after it."""
    numbers: dict[str, list[str]] = {}
    for patch in patches:
        for file in patch.files:
            numbers.setdefault(file, []).append(patch.name.partition("-")[0])
    for file, by in numbers.items():
        path = root / file
        first, end, rest = path.read_text().partition("\n")
        notice = f"{COMMENTS.get(path.suffix, '//')} Changed by hvdtrain from Horovod's own: patches {', '.join(by)}."
        lines = (first, notice, rest) if first.startswith("#!") else (notice, first, rest)
        path.write_text("\n".join(lines) if end else f"{notice}\n{first}")
