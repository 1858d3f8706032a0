"""Plans for the tests of their page, with round figures."""

from spmdkit.mesh.targets import parse_target
from spmdkit.planning.memory import AnalyticMemory
from spmdkit.planning.run_plan import RunPlan
from spmdkit.planning.timeline import Timeline
from spmdkit.planning.trace import COMPUTE, NETWORK, Event
from spmdkit.planning.traffic import Traffic

ALTERNATIVES = [
    {
        "strategy": {"pipe": {"size": 2, "microbatches": 8}, "fsdp": size},
        "accumulate": 1,
        "remat": "full",
        "step_seconds": 0.5 * size,
        "peak_bytes": size << 30,
        "exposed_communication": 0.25,
        "bubble": 0.1,
        "reason": f"slower: <{size}>" if size > 4 else "",
    }
    for size in (4, 8, 16)
]


def make_plan(target: str, mesh: dict[str, int], compiled: bool = True) -> RunPlan:
    """A step of 1 second: 0.75 in kernels, then a wait; sends over all axes of the mesh."""
    events = [Event(COMPUTE, f"fusion.{n}", 0.25 * n, 0.25, "") for n in range(3)]
    events += [Event(COMPUTE, "waits for all-gather", 0.75, 0.25, ""), Event(NETWORK, "all-gather", 0.5, 0.25, "")]
    events += [Event(NETWORK, "all-gather", 0.75, 0.25, "")]
    return RunPlan(
        target=parse_target(target),
        mesh=mesh,
        state={"parameters": 1 << 30, "optimizer": 2 << 30},
        traffic=tuple(Traffic("all-gather", (axis,), axis, "", 4, 1 << 30, "network", 0.25) for axis in mesh),
        bubble=0.0,
        model_flops=None,
        dtype="bfloat16",
        tokens=1000,
        step_seconds=1.0,
        analytic=AnalyticMemory({"parameters": 1 << 30, "gradients": 1 << 30}, 1 << 30, 1 << 30, 5 << 30),
        peak_bytes=8 << 30,
        temporaries=5 << 30 if compiled else None,
        timeline=Timeline(1.0, 0.75, 0.5, 0.25, 0.0, (), {}) if compiled else None,
        compile_seconds=3.0 if compiled else None,
        events=tuple(events) if compiled else (),
        notes=("a note & a half",),
    )
