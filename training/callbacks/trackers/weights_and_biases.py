"""The metrics and the config of a run, for Weights & Biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..callback import Callback
from ..run import Run
from .optional import needs


@dataclass(kw_only=True)
class WeightsAndBiases(Callback):
    """Gives the config and the metrics of logged steps to Weights & Biases (extra `wandb`).

    Offline it writes to run.dir/wandb and sends nothing; `wandb sync` sends that later.
    """

    project: str = "spmdkit"
    """Of Weights & Biases."""
    run_name: str = ""
    """Of the run there; empty = the name of run.dir."""
    mode: Literal["offline", "online"] = "offline"
    """offline, nothing leaves this machine; online, metrics are sent while the run goes on."""

    def __post_init__(self) -> None:
        self._wandb: Any = None

    def prepare(self, run: Run) -> None:
        """Looks for wandb."""
        needs("wandb", "wandb")

    def on_train_begin(self, run: Run) -> None:
        """Begins a run there; one that goes on here is another one there, in the same group."""
        if not run.is_main:
            return
        import wandb  # pyright: ignore[reportMissingImports]

        name = self.run_name or run.folder.resolve().name
        self._wandb = wandb.init(
            project=self.project,
            name=name,
            group=name,
            dir=str(run.folder),
            mode=self.mode,
            config=run.config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )

    def on_step_end(self, run: Run, record: Mapping[str, Any]) -> None:
        """Adds each metric."""
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def on_train_end(self, run: Run) -> None:
        """Ends the run there, in order."""
        self._finish(0)

    def close(self) -> None:
        """Ends the run there as failed, where it has not ended in order."""
        self._finish(1)

    def _finish(self, code: int) -> None:
        ending, self._wandb = self._wandb, None
        if ending is not None:
            ending.finish(exit_code=code)
