"""Everything that the folder of a run says of it. It is only read, and the run may be under way."""

from pathlib import Path
from typing import Any, NamedTuple

from ...configs.reading.reader import read_yaml
from ...configs.secret_variables import redact_config
from ...mesh.errors import UserError
from ...training.callbacks.samples import NAME as SAMPLES
from ...training.goodput import NAME as GOODPUT
from ...training.goodput import Goodput, ledger_lines, read_goodput
from ...training.metrics import read_metrics
from ...training.report.course import Course, course_of
from .facts import Facts, read_facts


class RunRecord(NamedTuple):
    """What a run has left so far.

    Attributes:
        folder: Of the run.
        config: Every key, plain data.
        metrics: The records of metrics.jsonl, at least one, of ascending steps.
        facts: Of report.json; None where that is missing or damaged.
        goodput: Where its time went; None where that is not known.
        course: The same over its time.
        samples: What it wrote on the way: `step` and `text` of each.
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    facts: Facts | None
    goodput: Goodput | None
    course: Course
    samples: list[dict[str, Any]]

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.metrics[-1]["step"]

    @property
    def steps(self) -> int | None:
        """Those of the config; None where it does not say."""
        train = self.config.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) else None


def read_run(folder: Path) -> RunRecord:
    """Reads the folder of a run.

    Args:
        folder: The folder.

    Raises:
        UserError: It holds no config or no metrics of a step, or a line of one of its files is damaged; names it.
    """
    metrics = _metrics(folder / "metrics.jsonl")
    return RunRecord(
        folder=folder,
        config=_config(folder / "config.yaml"),
        metrics=metrics,
        facts=read_facts(folder),
        goodput=read_goodput(folder / GOODPUT),
        course=course_of(ledger_lines(folder / GOODPUT), metrics),
        samples=read_metrics(folder / SAMPLES) if (folder / SAMPLES).is_file() else [],
    )


def _metrics(path: Path) -> list[dict[str, Any]]:
    records = read_metrics(path) if path.is_file() else []
    if not records:
        raise UserError(
            f"{path} {'is empty' if path.is_file() else 'is missing'}: there is no metric to show. Wait until the run "
            "has logged a step (run.log_every), or give another run."
        )
    before = 0
    for number, record in enumerate(records, 1):
        step = record.get("step")
        if type(step) is not int or step <= before:
            raise UserError(
                f"{path}, record {number}: its step is {step!r}, after step {before}; steps are whole numbers that "
                "rise. Remove it."
            )
        before = step
    return records


def _config(path: Path) -> dict[str, Any]:
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
        wrong = "; ".join(problem.message for problem in document.problems)
        wrong = wrong or ("" if isinstance(document.value, dict) else "it holds no mapping of sections")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, which says what the run is. Put it back, or give another run.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error.reason}). Put it back, or give another run.") from error
    if wrong:
        raise UserError(f"{path} cannot be read as the config of a run: {wrong}. Put it back, or give another run.")
    return redact_config(document.value)
