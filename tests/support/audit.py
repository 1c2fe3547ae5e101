"""`make check`: pip-audit over the installed packages. A known vulnerability fails it, but for those in IGNORED;
where the service cannot be reached, or knows nothing, the last line says that nothing was audited."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

IGNORED: dict[str, str] = {}  # number of a vulnerability: why it does not concern this project
SECONDS = 300
UNREACHABLE = r"requests\.exceptions\.|Could not connect|not redirecting|\b[45]\d\d (Client|Server) Error"


def main(flags: Sequence[str] = ()) -> int:
    """The exit code; `flags` are pip-audit's."""
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", "--timeout=15", *flags]
    command += [f"--ignore-vuln={number}" for number in IGNORED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"pip-audit: NOT AUDITED, no answer within {SECONDS} s")
        return 0
    if done.stdout.startswith("{"):
        return _report(json.loads(done.stdout)["dependencies"])
    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if re.search(UNREACHABLE, done.stderr):
        print(f"pip-audit: NOT AUDITED, the service cannot be reached: {reason}")
        return 0
    print(f"pip-audit failed: {reason}", file=sys.stderr)
    return 1


def _report(packages: list[dict]) -> int:
    unknown = [it["name"] for it in packages if "skip_reason" in it]
    found = [(it["name"], it["version"], known["id"]) for it in packages for known in it.get("vulns", ())]
    for name, version, number in found:
        print(f"pip-audit: {name} {version} has {number}: require a newer one, or say in {__file__} why it may stay")
    if len(unknown) == len(packages):
        print(f"pip-audit: NOT AUDITED, the service knows none of {len(packages)} packages")
    else:
        names = f"; unknown to the service: {', '.join(unknown)}" if unknown else ""
        print(f"pip-audit: {len(packages) - len(unknown)} packages, {len(found)} vulnerabilities{names}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
