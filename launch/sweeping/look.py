"""What one run of a sweep would hold and send, or why it cannot be; found in a process of its own.

    python -m spmdkit.launch.sweeping.look '{"source": "my.yaml", "overrides": ["strategy=fsdp"], "fresh": false}'

A process has one number of devices, so each run of a sweep needs its own. It goes as far as `spmdkit train` goes before
it writes anything, and prints one JSON object; where the run cannot be, it ends as `train` would, with the same words.
The program it compiles is kept where `run.cache` says, and training reads it there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ...configs.load import load_config
from ...configs.schema import Config
from ...mesh.joining.sources import without_job
from ...training.ending.exits import FINISHED, TRY_AGAIN, report_error
from ..run.build import build, keep_compiled, prepare_devices
from ..run.directory.provenance import provenance
from ..run.directory.resume import adopt_folder
from ..run.explain import explain_built
from ..run.guarding.memory import check_memory
from ..supervision.blame import ending
from ..supervision.bound import VARIABLE as BOUND
from ..supervision.bound import bind_to_parent
from ..supervision.output import last_words


class Seen(NamedTuple):
    """What was found.

    Attributes:
        costs: What `look` gives; empty where the run cannot be.
        problem: Why it cannot be; "" where it can.
        exit_code: What a command ends with for that reason.
    """

    costs: dict[str, Any]
    problem: str = ""
    exit_code: int = FINISHED


def look_apart(source: str, overrides: Sequence[str], *, fresh: bool = False) -> Seen:
    """Looks at a run in a process of its own.

    Args:
        source: A YAML file or the name of a preset.
        overrides: `key=value` each.
        fresh: Whether the run would start anew.
    """
    asked = json.dumps({"source": source, "overrides": list(overrides), "fresh": fresh})
    ended = subprocess.run(
        [sys.executable, "-P", "-m", __name__, asked],
        env=without_job(os.environ) | {BOUND: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if ended.returncode == FINISHED:
        return Seen(json.loads(ended.stdout))
    words = "\n".join(last_words(ended.stderr.splitlines())).removeprefix("error: ")
    return Seen({}, words or ending(ended.returncode), ended.returncode if ended.returncode > 0 else TRY_AGAIN)


def look(config: Config, *, fresh: bool = False) -> dict[str, Any]:
    """Finds what a run would hold and send, after every check that training makes before it writes.

    Args:
        config: Of the run.
        fresh: Whether the run would start anew.

    Returns:
        `devices`, `predicted_bytes` (of the compiled step, on one device) and `collective_bytes` (of one step), as
        `final_figures` has them of a trained run.

    Raises:
        UserError: It cannot be.
    """
    prepare_devices(config)
    keep_compiled(config)
    built = build(config)
    check_memory(built)
    adopt_folder(config, provenance(built), fresh=fresh)
    explained = explain_built(built)
    return {
        "devices": prod(explained.axes.values()),
        "predicted_bytes": explained.compiled["total"],
        "collective_bytes": sum(line.bytes for line in explained.found),
    }


def main() -> int:
    """Looks at the run that the one argument asks for."""
    bind_to_parent()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's own code prints is no part of the answer
    asked = json.loads(sys.argv[1])
    try:
        found = look(load_config(asked["source"], asked["overrides"]), fresh=asked["fresh"])
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error)
    with answer:
        json.dump(found, answer)
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
