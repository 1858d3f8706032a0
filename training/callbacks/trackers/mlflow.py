"""The metrics and the config of a run, for MLflow."""

import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..callback import Callback
from ..run import Run
from .optional import needs

MOST_PARAMS = 100
"""Parameters that MLflow takes in one call."""
LONGEST_PARAM = 500
"""Characters of a parameter's value, as every store of MLflow takes them."""
REFUSED = re.compile(r"[^\w.\- /]")
"""Characters that MLflow takes in no name; patterns, which are keys of some sections, hold them."""


@dataclass(kw_only=True)
class MLflow(Callback):
    """Gives the config and the metrics of logged steps to MLflow (extra `mlflow`).

    Without `tracking_uri` it writes to run.dir/mlruns and sends nothing; MLflow's own reports of its use are turned
    off, unless MLFLOW_DISABLE_TELEMETRY says otherwise. Where MLflow fails, as where a server cannot be reached,
    one warning says so and training goes on without it.
    """

    experiment: str = "spmdkit"
    """Of MLflow; it is made where there is none."""
    run_name: str = ""
    """Of the run there; empty = the name of run.dir."""
    tracking_uri: str = ""
    """A server or a store of MLflow, such as http://host:5000; empty = files in run.dir/mlruns."""

    def __post_init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def prepare(self, run: Run) -> None:
        """Looks for MLflow."""
        needs("mlflow", "mlflow")

    def on_train_begin(self, run: Run) -> None:
        """Begins a run there; one that goes on here is another one there, of the same name."""
        if run.is_main:
            with self._goes_on_without():
                self._begin(run)

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Adds each metric that is a finite number."""
        if self._client is None:
            return
        with self._goes_on_without():
            self._log(record)

    def _begin(self, run: Run) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if not self.tracking_uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        folder = run.folder.resolve()
        self._client = MlflowClient(self.tracking_uri or (folder / "mlruns").as_uri())
        tags = {"spmdkit.run_dir": str(folder), "spmdkit.start_step": str(run.start)}
        name = self.run_name or folder.name
        self._run_id = self._client.create_run(self._experiment_id(), run_name=name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:LONGEST_PARAM]) for key, value in _leaves(run.config)]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def _log(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        values = {name: float(value) for name, value in record.items() if name != "step" and value is not None}
        metrics = [
            Metric(_name(name), value, now, record["step"]) for name, value in values.items() if math.isfinite(value)
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def on_train_end(self, run: Run) -> None:
        """Ends the run there, in order."""
        self._finish("FINISHED")

    def close(self) -> None:
        """Ends the run there as failed, where it has not ended in order."""
        self._finish("FAILED")

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        return found.experiment_id if found else self._client.create_experiment(self.experiment)

    def _finish(self, status: str) -> None:
        client, self._client = self._client, None
        if client is not None:
            with self._goes_on_without():
                client.set_terminated(self._run_id, status)

    @contextmanager
    def _goes_on_without(self) -> Iterator[None]:
        """Any error of MLflow, a server or a disk ends what is written there, with one warning."""
        try:
            yield
        except Exception as error:
            self._client = None
            said = " ".join(str(error).split())[:300]
            warnings.warn(
                f"MLflow fails: {type(error).__name__}: {said}. Training goes on, and gives it nothing more.",
                stacklevel=2,
            )


def _name(text: str) -> str:
    """A name that MLflow takes, such as data.layout._ for data.layout.*."""
    return REFUSED.sub("_", text)


def _leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a config with its value, below the sections that it stands in."""
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _leaves(each, f"{above}{name}.")
        else:
            yield f"{above}{name}", each
