"""What a language model writes, every few evaluations."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ...mesh.errors import UserError
from .callback import Callback
from .monitor import number_problems, refuse
from .run import Run

NAME = "samples.jsonl"


@dataclass(kw_only=True)
class Samples(Callback):
    """Lets a language model continue a prompt, every few evaluations; run.dir/samples.jsonl keeps what it writes."""

    every: int = 1
    """Evaluations from one sample to the next."""
    prompt: str = "def "
    """What the text begins with."""
    length: int = 100
    """Tokens to generate."""
    temperature: float = 0.8
    """0 = always the likeliest token; 1 = the model's own distribution."""

    def __post_init__(self) -> None:
        refuse(number_problems({"every": 1, "length": 1, "temperature": 0}, vars(self)))
        self.monitors = ""
        self._seen = 0

    def state(self) -> Mapping[str, int]:
        """Evaluations so far."""
        return {"seen": self._seen}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on from there."""
        self._seen = state["seen"]

    def prepare(self, run: Run) -> None:
        """Looks whether the model writes text."""
        if run.generate is None:
            raise UserError(
                "callbacks: samples are of a model that predicts bytes of text and has a `predict`; this one does not. "
                "Leave samples out."
            )

    def on_train_begin(self, run: Run) -> None:
        """Drops the samples of steps that are trained again."""
        file = run.folder / NAME
        if run.is_main and file.exists():
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= run.start]
            file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Generates, all processes together."""
        self._seen += 1
        if self._seen % self.every:
            return
        assert run.generate is not None
        text = run.generate(self.prompt, self.length, self.temperature)
        run.say(f"Step {run.step} writes:\n\n{text}\n")
        if run.is_main:
            with (run.folder / NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": run.step, "text": text}) + "\n")
