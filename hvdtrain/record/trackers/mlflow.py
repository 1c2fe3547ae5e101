"""MLflow, with the server of MLFLOW_TRACKING_URI, or else with files in `mlruns` beside the run folder."""

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from hvdtrain.record.trackers.process import Start

STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
PARAMS_AT_ONCE = 100  # a server takes no more
LONGEST = 500


class Tracker:
    """A run of MLflow. The user's MLFLOW_* variables have priority."""

    def start(self, start: Start) -> str:
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # All runs of a folder in one store, to be compared. Files, not SQLite: jobs on several nodes write at once.
            uri = (start.folder.parent / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._continued(os.environ.get("MLFLOW_RUN_ID") or start.run_id) or self._created(start)
        self._describe(dict(flattened(start.metadata)))
        start.note(f"run {self._id} in {re.sub('//[^/]*@', '//', uri)}")
        return self._id

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [Metric(re.sub(r"[^\w./ -]", "_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points)

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, STATES[state])

    def _continued(self, run_id: str | None) -> str | None:
        """The id of the run to continue; None where the store does not know it."""
        if run_id:
            try:
                self._client.update_run(run_id, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None
        return run_id

    def _created(self, start: Start) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", start.project)
        if not experiment:
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._create_experiment(name)
        run = self._client.create_run(experiment, run_name=start.folder.name)
        return str(run.info.run_id)

    def _create_experiment(self, name: str) -> str:
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            found = self._client.get_experiment_by_name(name)  # another job was first
            if not found:
                raise
            return str(found.experiment_id)

    def _describe(self, metadata: dict[str, str]) -> None:
        """Stores recipe and plan as parameters, which cannot change, and everything else, and what has changed since,
        as tags."""
        params = {key: value for key, value in metadata.items() if key.startswith(("recipe.", "plan."))}
        there = self._client.get_run(self._id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in there]
        for first in range(0, len(new), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=new[first : first + PARAMS_AT_ONCE])
        tags = {key: value for key, value in metadata.items() if key not in params or there.get(key, value) != value}
        self._client.log_batch(self._id, tags=[RunTag(key, value) for key, value in tags.items()])


def flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """{"recipe": {"model": "linear"}} -> ("recipe.model", "linear"), …"""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flattened(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(inner)[:LONGEST]
