"""A learner's own copies of the notebooks, and JupyterLab on them: `python -m labtools.notebooks [FOLDER]`.

Behind `--exercises` the solutions are left out.

Git sees no change when a copy is saved, and a copy is never overwritten.
"""

import getpass
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from hvdtrain import files, untrusted
from hvdtrain.errors import LabError

LABS = Path(__file__).resolve().parents[1]
TOOLS = LABS / "labtools"
KERNEL = "hvdtrain"
WITHOUT_SOLUTIONS = "--exercises"
LARGEST = 2**22  # bytes of a notebook that is handed out


def copy(folder: Path, kernel: str | None = None, solutions: bool = True) -> list[str]:
    """The names of the notebooks that were missing in the folder, and have been copied to it.

    `import labtools` works in the folder, whichever environment JupyterLab runs in. The copies name the kernel, if one
    is given. Raises LabError where the folder is another user's, or holds something else by the name of labtools.
    """
    files.make_folder(folder)
    if not files.is_own(folder.stat()):
        raise LabError(f"{folder} belongs to another user: name a folder of your own, or one that does not exist yet.")
    _link_tools(folder / TOOLS.name)
    copied = []
    for notebook in sorted(LABS.glob("*-*.ipynb" if solutions else "*-exercise-*.ipynb")):
        content = json.loads(files.read_bytes(notebook, LARGEST))
        if kernel:
            content["metadata"]["kernelspec"] |= {"name": kernel, "display_name": kernel}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        if _create(folder / notebook.name, text):
            copied.append(notebook.name)
    return copied


def _link_tools(link: Path) -> None:
    if link.is_symlink() and link.resolve() != TOOLS:
        link.unlink()  # to a clone that was moved
    if not link.exists():
        link.symlink_to(TOOLS)
    if link.resolve() != TOOLS:
        raise LabError(f"{link} must be a link to {TOOLS}: rename what is there.")


def _create(path: Path, text: str) -> bool:
    """Whether there was nothing at the path, not even a link, so that it now holds the text."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(text)
    except OSError:
        path.unlink()
        raise
    return True


def shown(folder: Path, root: str) -> str:
    """Where the file browser of a JupyterLab that shows the folder `root` has this folder. Raises LabError."""
    top = Path(files.with_home(root or "~")).resolve()
    if not folder.is_relative_to(top):
        command = f"cd {LABS} && {sys.executable} -m labtools.notebooks {top}/labs"
        raise LabError(f"{folder} is not in {top}, all that this JupyterLab shows. Put the copies there: {command}")
    return str(folder.relative_to(top))


def has_browser(environ: Mapping[str, str]) -> bool:
    """Whether a browser with a window opens here: not one of a terminal, which cannot show JupyterLab."""
    screen = sys.platform == "darwin" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    try:
        return screen and bool(webbrowser.get())
    except webbrowser.Error:
        return False


def tunnel(port: int, path: str) -> str:
    """How to reach JupyterLab on this machine from a browser on another."""
    here = f"{getpass.getuser()}@{socket.gethostname()}"
    return (
        "\nNo browser opens on this machine. On your own computer, leave this running in a terminal:\n\n"
        f"    ssh -N -L {port}:localhost:{port} {here}\n\n"
        f"and open in a browser there:\n\n    http://localhost:{port}{path}\n\n"
        f"If {socket.gethostname()} is a compute node, add -J {getpass.getuser()}@LOGIN-NODE before -N.\n"
        f"If port {port} is taken on your computer, write another number before the first colon, and in the address.\n"
    )


def _explain_tunnel() -> None:
    """Prints the address once this process's server answers, below what the server prints itself."""
    from jupyter_server.serverapp import list_running_servers

    while True:
        time.sleep(1)
        for server in list_running_servers():
            if server["pid"] == os.getpid():
                time.sleep(1)
                print(tunnel(server["port"], f"{server['base_url']}lab?token={server['token']}"), file=sys.stderr)
                return


def _serve(folder: Path) -> None:
    try:
        from jupyterlab.labapp import LabApp
    except ImportError:
        raise LabError("JupyterLab is not installed in this environment: make .venv/labs installs it.") from None
    arguments = [f"--ServerApp.root_dir={folder}", *(["--allow-root"] if os.geteuid() == 0 else [])]
    if not has_browser(os.environ):
        arguments.append("--no-browser")
        threading.Thread(target=_explain_tunnel, daemon=True).start()
    LabApp.launch_instance(arguments)


def _in_jupyter(folder: Path, root: str) -> None:
    """In a terminal of a JupyterLab, as on a JupyterHub: that one opens the copies, with this environment's kernel."""
    place = shown(folder, root)
    subprocess.run([sys.executable, "-m", "ipykernel", "install", "--user", "--name", KERNEL], check=True)
    print(f"Open {place} in the file browser on the left. The notebooks there have the kernel {KERNEL!r}.")


def main(arguments: list[str], environ: Mapping[str, str]) -> None:
    given, without = arguments, arguments[:1] == [WITHOUT_SOLUTIONS]
    arguments = arguments[without:]
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        raise LabError(f"usage: python -m labtools.notebooks [{WITHOUT_SOLUTIONS}] [FOLDER], got {shlex.join(given)}")
    folder = Path(files.with_home(arguments[0] if arguments else str(LABS / "work"))).resolve()
    inside = environ.get("JUPYTERHUB_SERVICE_PREFIX") or environ.get("JUPYTER_SERVER_URL")
    root = environ.get("JUPYTER_SERVER_ROOT") or environ.get("JUPYTERHUB_ROOT_DIR") or ""
    if inside:
        shown(folder, root)
    copied = copy(folder, KERNEL if inside else None, solutions=not without)
    print(f"{folder}: {len(copied)} notebooks copied. A copy that is there is kept: rename it to get a fresh one.")
    if inside:
        _in_jupyter(folder, root)
    else:
        _serve(folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:], os.environ)
    except (LabError, OSError) as error:
        sys.exit(untrusted.one_line(error))
