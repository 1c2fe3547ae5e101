"""`make horovod-source`: Horovod's release as a git repository with a commit for each patch; `make patches`: writes the
commits back into `hvdtrain/tools/build/patches`. Between the two they are edited, moved, bisected and rebased by git.

A commit's message is the patch's subject, its reason, and the lines `Upstream:` and `Name:`. The first two commits are
the release and the files that hvdtrain adds (`tools/build/sources`), which are edited there.
"""

import os
import re
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

from paths import REPOSITORY

from hvdtrain.tools.build import patching, wheel_dir
from hvdtrain.tools.build.plan import SDIST, VERSION

FOLDER = REPOSITORY / "horovod-source"
ADDED = "Files that hvdtrain adds"
MESSAGE = re.compile(r"(?P<subject>.+)\n\n(?P<reason>(?:.+\n)+)\nUpstream: (?P<upstream>.+)\nName: (?P<name>[\w-]+)\n*")
WIDTH = 118


def git(folder: Path, *arguments: str, given: str | None = None) -> str:
    """What git prints, without the settings of the user and of a repository around it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    environ |= {f"GIT_{who}_{what}": "hvdtrain" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", *arguments],
        cwd=folder, env=environ, input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"git {arguments[0]} in {folder}: {done.stderr.strip()}")
    return done.stdout


def unpack(sdist: Path, folder: Path) -> None:
    """Makes the repository."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder.parent, filter="data")
    (folder.parent / f"horovod-{VERSION}").rename(folder)
    git(folder, "init", "--quiet", "--initial-branch=patches")
    _commit(folder, f"Horovod {VERSION}")
    patching.add_sources(folder)
    _commit(folder, ADDED)
    for patch in patching.every():
        patching.apply(folder, [patch], "git")
        _commit(folder, f"{patch.subject}\n\n{patch.reason}\n\nUpstream: {patch.upstream}\nName: {patch.name[5:]}")


def _commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "--no-verify", "--cleanup=verbatim", "--file=-", given=message)


def series(folder: Path) -> dict[str, str]:
    """The texts of the patch files, by their names: one for each commit behind the first two."""
    commits = git(folder, "rev-list", "--reverse", "--first-parent", "HEAD").split()
    if len(commits) < 2 or git(folder, "log", "-1", "--format=%s", commits[1]).strip() != ADDED:
        sys.exit(f'{folder}: the second commit must be "{ADDED}": make horovod-source again.')
    found = {}
    for number, commit in enumerate(commits[2:], 1):
        text = git(folder, "log", "-1", "--format=%B", commit)
        if not (message := MESSAGE.fullmatch(text)):
            sys.exit(f"{folder}: the message of {commit[:10]} must be a subject, a reason, Upstream: and Name:.")
        diff = git(folder, "diff-tree", "-p", "--no-ext-diff", "--no-renames", "--no-color", f"{commit}^", commit)
        head = [f"{key.capitalize()}: {' '.join(message[key].split())}" for key in ("subject", "reason", "upstream")]
        folded = [textwrap.fill(line, WIDTH, subsequent_indent=" ", break_on_hyphens=False) for line in head]
        found[f"{number:04}-{message['name']}.patch"] = "\n".join(
            [*folded, "", re.sub(r"^index .*\n", "", diff, flags=re.M)]
        )
    return found


def main(verb: str) -> None:
    """Makes the repository, or writes its commits back."""
    if verb == "unpack":
        sdist = wheel_dir(None, os.environ) / SDIST
        if FOLDER.exists():
            sys.exit(f"{FOLDER} is there already: make patches, if you have changed it, and remove it.")
        if not sdist.is_file():
            sys.exit(f"no {sdist}: python -m hvdtrain build fetches it.")
        unpack(sdist, FOLDER)
    else:
        texts = series(FOLDER)
        for path in patching.PATCHES.glob("*.patch"):
            path.unlink()
        for name, text in texts.items():
            (patching.PATCHES / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
