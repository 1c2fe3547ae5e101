"""Weights & Biases, online where its server answers and a key is configured, or else offline in the run folder."""

import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # telemetry of its own, which needs the internet

import wandb

from hvdtrain.record.trackers.process import Start

REACH_SECONDS = 2.0
SETTINGS: dict[str, Any] = {  # those that the installed version has
    # Nothing of the host, the command line or the environment: only what the run reports.
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "silent": True,
    "console": "off",
    "x_stats_pid": os.getppid(),  # the training's, whose use of the machine it shows
}


class Tracker:
    """A run of wandb. The user's WANDB_* variables and settings files have priority."""

    def start(self, start: Start) -> str:
        given = wandb.setup().settings
        chosen = {key: value for key, value in SETTINGS.items() if key in type(given).model_fields}
        chosen |= {
            "root_dir": str(start.folder),
            "project": start.project,
            "run_name": start.folder.name,
            "resume": "allow",
        }
        if start.run_id:
            chosen["run_id"] = start.run_id
        if why := why_offline(given):
            chosen["mode"] = "offline"
        chosen = {
            key: value for key, value in chosen.items() if key not in given.model_fields_set or key == "x_stats_pid"
        }
        self._run = wandb.init(config=dict(start.metadata), settings=wandb.Settings(**chosen))
        # wandb's own step only rises: steps that a resumed training makes again would be lost.
        self._run.define_metric("*", step_metric="step")
        direction, _, name = str(start.metadata.get("best", "")).partition(" ")
        if summary := {"highest": "max", "lowest": "min"}.get(direction):
            self._run.define_metric(name, step_metric="step", summary=summary)
        if self._run.offline:
            start.note(f"offline{why}; to sync: wandb sync {start.folder}/wandb/*-{self._run.id}")
        elif self._run.url:
            start.note(self._run.url)
        return self._run.id

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self, state: str) -> None:
        self._run.summary["state"] = state
        self._run.finish(exit_code=0 if state == "finished" else 1)


def why_offline(settings: Any) -> str:
    """Why the run is offline, in brackets; "" where it is online, or the user's settings decide."""
    if "mode" in settings.model_fields_set:
        return ""
    if not answers(settings.base_url):
        return f" ({urllib.parse.urlsplit(settings.base_url).hostname} does not answer)"
    if not wandb.login(prompt=False):
        return " (no API key: wandb login)"
    return ""


def answers(url: str, seconds: float = REACH_SECONDS) -> bool:
    """Whether the server's host, or the proxy, accepts a connection within `seconds`."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    taken: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection(address, seconds).close()
            taken.append(True)
        except (OSError, UnicodeError):
            pass

    thread = threading.Thread(target=connect, daemon=True)  # looking up a name has no limit of its own
    thread.start()
    thread.join(seconds)
    return bool(taken)
