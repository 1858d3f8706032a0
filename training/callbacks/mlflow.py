"""The metrics and the config of a run, for MLflow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .callback import Callback
from .optional import needs
from .run import Run

MOST_CHARACTERS = 500
"""Of the value of a parameter, in every version of MLflow."""
TOGETHER = 100
"""Parameters that MLflow takes in one call."""


@dataclass(kw_only=True)
class MLflow(Callback):
    """Gives the config and the metrics of logged steps to MLflow (extra `mlflow`)."""

    uri: str = ""
    """Of the tracking server; empty = a database in run.dir, mlflow.db."""
    experiment: str = "spmdkit"
    """Of MLflow."""

    def __post_init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def prepare(self, run: Run) -> None:
        """Looks for MLflow."""
        needs("mlflow", "mlflow")

    def on_train_begin(self, run: Run) -> None:
        """Begins a run there; one that goes on here is another one there, of the same name."""
        if not run.is_main:
            return
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.uri or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}")
        known = client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else client.create_experiment(self.experiment)
        self._id = client.create_run(experiment, run_name=run.folder.resolve().name).info.run_id
        self._client = client
        params = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in _leaves(run.config)]
        for first in range(0, len(params), TOGETHER):
            client.log_batch(self._id, params=params[first : first + TOGETHER])

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Adds each metric."""
        if self._client is not None:
            for name, value in record.items():
                if name != "step":
                    self._client.log_metric(self._id, name, value, step=record["step"], synchronous=False)

    def on_train_end(self, run: Run) -> None:
        """Ends the run there, in order."""
        self._finish("FINISHED")

    def close(self) -> None:
        """Ends the run there as failed, where it has not ended in order."""
        self._finish("FAILED")

    def _finish(self, status: str) -> None:
        ending, self._client = self._client, None
        if ending is not None:
            ending.set_terminated(self._id, status)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a config with its value; MLflow takes letters, digits and a few signs in names."""
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        else:
            yield key, value
