"""Prints the oldest versions that setup.cfg allows, as constraints for pip: `make test-versions` installs them."""

import configparser
import re

from paths import REPOSITORY

EXTRAS = ("torch", "tensorflow", "lightning")


def bounds() -> dict[str, str]:
    """The oldest version by library, of all that training can import."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    requirements = [setup["options"]["install_requires"], *(setup["options.extras_require"][each] for each in EXTRAS)]
    return dict(re.findall(r"^([\w.-]+)>=([\w.]+)$", "\n".join(requirements), re.MULTILINE))


if __name__ == "__main__":
    oldest = bounds()
    oldest["tensorflow-cpu"] = oldest["tensorflow"]
    for library, version in oldest.items():
        print(f"{library}=={version}")
