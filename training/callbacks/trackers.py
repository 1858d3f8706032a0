"""Callbacks that send metrics and the config to experiment trackers: TensorBoard, Weights & Biases, MLflow."""

import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...layouts.paths import flatten_mapping
from ...mesh.errors import UserError
from ...parallel.options import LocalPath
from ..run_files import Kind
from .callback import CatalogCallback, Run

MAX_PARAMS = 100
"""Parameters in one call of MLflow."""
MAX_PARAM = 500
"""Characters of a parameter's value in every store of MLflow."""
REFUSED = re.compile(r"[^\w.\- /]")
"""Characters that are invalid in names of MLflow, such as those of patterns."""


class Tracker(CatalogCallback):
    """Opens a run in a tracker and sends it the metrics of logged steps, in the main process."""

    library: ClassVar[str]
    extra: ClassVar[str]
    _client: Any = None

    def prepare(self, run: Run) -> None:
        """Checks that the tracker's library is installed, without importing it."""
        if find_spec(self.library) is None:
            raise UserError(f"{self.library} is not installed. Install it with: pip install 'spmdkit[{self.extra}]'.")

    def on_train_begin(self, run: Run) -> None:
        """Opens a run; a resumed run is another one."""
        if run.is_main:
            self._client = self._open(run)

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Sends each metric."""
        if self._client is not None:
            self._log(record["step"], {name: value for name, value in record.items() if name != "step"})

    def on_train_end(self, run: Run) -> None:
        """Marks the run as finished."""
        self._end(finished=True)

    def close(self) -> None:
        """Marks the run as failed unless it has finished."""
        self._end(finished=False)

    def _end(self, *, finished: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._close(client, finished)

    def _open(self, run: Run) -> Any:
        """Opens a run in the tracker."""

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Sends the metrics of a step."""

    def _close(self, client: Any, finished: bool) -> None:
        """Marks the run as finished or failed."""


@dataclass(kw_only=True)
class TensorBoard(Tracker):
    """Writes the metrics of logged steps for TensorBoard (extra `tensorboard`); view with `tensorboard --logdir`.

    tensorboardX writes them; TensorFlow is not needed.
    """

    library, extra = "tensorboardX", "tensorboard"
    writes: ClassVar[Kind | None] = "folder"

    path: LocalPath = "tensorboard"
    """The directory; a relative path starts from run.dir."""

    def _open(self, run: Run) -> Any:
        """Opens a file; steps after the first one in earlier files are hidden."""
        from tensorboardX import SummaryWriter

        folder = run.folder / Path(self.path).expanduser()
        return SummaryWriter(str(folder), purge_step=run.start + 1 if run.start else None)

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._client.add_scalar(name, value, step)

    def _close(self, client: Any, finished: bool) -> None:
        client.close()


@dataclass(kw_only=True)
class WeightsAndBiases(Tracker):
    """Sends the config and the metrics of logged steps to Weights & Biases (extra `wandb`).

    Offline, it writes to run.dir/wandb and sends nothing; `wandb sync` sends that later.
    """

    library = extra = "wandb"

    project: str = "spmdkit"
    """Project in Weights & Biases."""
    run_name: str = ""
    """Name of the run there; empty = the name of run.dir."""
    mode: Literal["offline", "online"] = "offline"
    """offline, nothing leaves this machine; online, metrics are sent during the run."""

    def _open(self, run: Run) -> Any:
        """Starts a run there; a resumed run is another one in the same group."""
        import wandb  # pyright: ignore[reportMissingImports]

        name = self.run_name or run.folder.resolve().name
        return wandb.init(
            project=self.project,
            name=name,
            group=name,
            dir=str(run.folder),
            mode=self.mode,
            config=run.config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._client.log(metrics, step=step)

    def _close(self, client: Any, finished: bool) -> None:
        client.finish(exit_code=0 if finished else 1)


@dataclass(kw_only=True)
class MLflow(Tracker):
    """Sends the config and the metrics of logged steps to MLflow (extra `mlflow`).

    Without `tracking_uri`, it writes to run.dir/mlruns and sends nothing; MLflow's telemetry is off unless
    MLFLOW_DISABLE_TELEMETRY is set otherwise. If MLflow fails, for example because a server is not reachable, training
    continues without it after one warning.
    """

    library = extra = "mlflow"

    experiment: str = "spmdkit"
    """Experiment in MLflow; created if it does not exist."""
    run_name: str = ""
    """Name of the run there; empty = the name of run.dir."""
    tracking_uri: str = ""
    """A server or a store of MLflow, such as http://host:5000; empty = files in run.dir/mlruns."""

    def on_train_begin(self, run: Run) -> None:
        """Starts a run there; a resumed run is another one with the same name."""
        with self._tolerate_errors():
            super().on_train_begin(run)

    def _open(self, run: Run) -> Any:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if not self.tracking_uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        folder = run.folder.resolve()
        client = MlflowClient(self.tracking_uri or (folder / "mlruns").as_uri())
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        tags = {"spmdkit.run_dir": str(folder), "spmdkit.start_step": str(run.start)}
        name = self.run_name or folder.name
        self._run_id = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:MAX_PARAM]) for key, value in flatten_mapping(run.config).items()]
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])
        return client

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Sends each metric that is a finite number."""
        with self._tolerate_errors():
            from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

            now = int(time.time() * 1000)
            values = {_name(name): float(value) for name, value in metrics.items() if value is not None}
            found = [Metric(name, value, now, step) for name, value in values.items() if math.isfinite(value)]
            self._client.log_batch(self._run_id, metrics=found)

    def _close(self, client: Any, finished: bool) -> None:
        with self._tolerate_errors():
            client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")

    @contextmanager
    def _tolerate_errors(self) -> Iterator[None]:
        """Stops logging with one warning after any error of MLflow, a server or a disk."""
        try:
            yield
        except Exception as error:
            self._client = None
            message = " ".join(str(error).split())[:300]
            warnings.warn(
                f"MLflow failed: {type(error).__name__}: {message}. Training continues without it.", stacklevel=2
            )


def _name(text: str) -> str:
    """Returns a valid name for MLflow, such as data.layout._ for data.layout.*."""
    return REFUSED.sub("_", text)
