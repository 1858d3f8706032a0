"""The loop alone with a step that only pretends, then the real one from plain Python."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.parallel.diloco import Copies
from spmdkit.parallel.step.state import StepMetrics, TrainState
from spmdkit.training.ending.exits import DIVERGED
from spmdkit.training.loop import RUN_AHEAD, Diverged, evaluate, run_steps

import spmdkit

ROWS, FEATURES, CLASSES = 16, 8, 4


class Late:
    """A scalar that is still being computed: it knows when it was first waited for."""

    def __init__(self, value: float, on_wait=lambda: None):
        self.value, self.on_wait = value, on_wait

    def block_until_ready(self) -> None:
        self.on_wait()
        self.on_wait = lambda: None

    def __float__(self) -> float:
        self.block_until_ready()
        return self.value


class PretendStep:
    """Counts steps; step n has loss 100 + n, takes `seconds` once it is waited for, and may go wrong."""

    def __init__(self, *, seconds: float = 0.0, losses: dict[int, float] | None = None, norms=None, params=None):
        self.started: list[int] = []
        self.awaited: list[tuple[int, int]] = []
        """Steps that were waited for, each with the newest step then started."""
        self.seconds, self.losses, self.norms, self.params = seconds, losses or {}, norms or {}, params or {}

    def __call__(self, state, batch):
        number = int(state.step) + 1
        self.started.append(number)
        loss = Late(self.losses.get(number, 100.0 + number), lambda: self._on_wait(number))
        norm = Late(self.norms.get(number, 1.0))
        return first_state(number, self.params.get(number, 1.0)), StepMetrics(loss, norm, Late(10.0))

    def _on_wait(self, number: int) -> None:
        time.sleep(self.seconds)
        self.awaited.append((number, self.started[-1]))


def first_state(step: int = 0, value: float = 1.0) -> TrainState:
    return TrainState(np.int32(step), {"w": jnp.full((2,), value), "count": jnp.int32(0)}, (), np.zeros(2, np.uint32))


def steps_reported(num_steps: int, **options) -> list[int]:
    reported = []
    run_steps(
        PretendStep(),
        first_state(options.get("start", 0)),
        [{}] * num_steps,
        on_progress=lambda progress: reported.append(progress.step),
        **options,
    )
    return reported


@pytest.mark.parametrize(
    ("num_steps", "options", "expected"),
    [
        (25, {"log_every": 10}, [10, 20, 25]),
        (20, {"log_every": 10}, [10, 20]),
        (3, {"log_every": 1}, [1, 2, 3]),
        (0, {"log_every": 1}, []),
        (10, {"log_every": 4, "start": 7}, [8, 12, 16, 17]),
        (12, {"log_every": 5, "pause_at": lambda number: number in (3, 10)}, [3, 5, 10, 12]),
        (2, {"log_every": 1, "pause_at": lambda number: True}, [1, 2]),
    ],
)
def test_logged_steps(num_steps, options, expected):
    assert steps_reported(num_steps, **options) == expected


def test_what_is_reported():
    reported = []
    run_steps(PretendStep(), first_state(), [{}] * 4, log_every=2, on_progress=reported.append)
    assert [(progress.step, progress.loss, progress.grad_norm) for progress in reported] == [(2, 102, 1), (4, 104, 1)]
    assert all(progress.extra == {} for progress in reported)


def test_metrics_are_read_late_and_in_order():
    step = PretendStep()
    run_steps(step, first_state(), [{}] * 9, log_every=1)
    assert [number for number, _ in step.awaited] == list(range(1, 10))
    lags = [started - number for number, started in step.awaited]
    assert lags == [RUN_AHEAD] * 7 + [1, 0]  # the last ones when there is nothing left to start


def test_the_host_does_not_run_further_ahead():
    step = PretendStep()

    def batches():
        for _ in range(9):
            assert len(step.started) - len(step.awaited) <= RUN_AHEAD
            yield {}

    run_steps(step, first_state(), batches())


def test_a_pause_comes_when_all_is_done_and_before_the_next_step():
    step, seen = PretendStep(), []

    def on_pause(number, state):
        seen.append(("pause", number, int(state.step), step.started[-1], step.awaited[-1][0]))
        return {"eval_loss": 7.0}

    run_steps(
        step,
        first_state(),
        [{}] * 5,
        log_every=2,
        pause_at=lambda number: number == 3,
        on_pause=on_pause,
        on_progress=lambda progress: seen.append(("report", progress.step, progress.extra)),
        after_pause=lambda number, state: seen.append(("after", number, int(state.step), step.started[-1])),
    )
    assert seen == [
        ("report", 2, {}),
        ("pause", 3, 3, 3, 3),
        ("report", 3, {"eval_loss": 7.0}),
        ("after", 3, 3, 3),
        ("report", 4, {}),
        ("report", 5, {}),
    ]


def test_pauses_do_not_count_as_training():
    reported = []
    run_steps(
        PretendStep(seconds=0.01),
        first_state(),
        [{}] * 12,
        log_every=4,
        pause_at=lambda number: number in (4, 6),
        on_pause=lambda number, state: time.sleep(0.5) or {},
        after_pause=lambda number, state: time.sleep(0.5),
        on_progress=reported.append,
    )
    assert [progress.step for progress in reported] == [4, 6, 8, 12]
    assert all(0.01 <= progress.seconds < 0.2 for progress in reported)
    assert all(50 < progress.tokens_per_second <= 1000 for progress in reported)
    assert [progress.tokens_per_second * progress.seconds for progress in reported] == pytest.approx(
        [10] * len(reported)
    )


def test_the_first_step_compiles_and_is_not_timed():
    class Compiling(PretendStep):
        def __call__(self, state, batch):
            if not self.started:
                time.sleep(1.0)
            return super().__call__(state, batch)

    reported = []
    run_steps(Compiling(seconds=0.01), first_state(6), [{}] * 6, start=6, log_every=5, on_progress=reported.append)
    assert [progress.step for progress in reported] == [10, 12]
    assert all(0.01 <= progress.seconds < 0.2 for progress in reported)
    assert all(50 < progress.tokens_per_second <= 1000 for progress in reported)
    assert [progress.tokens_per_second * progress.seconds for progress in reported] == pytest.approx(
        [10] * len(reported)
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_divergence_names_the_step_and_stops_before_a_pause(loss):
    step, paused, reported = PretendStep(losses={6: loss}), [], []
    with pytest.raises(Diverged, match=r"Step 6: the loss is (nan|inf) .*Lower optimizer\.learning_rate") as info:
        run_steps(
            step,
            first_state(),
            [{}] * 20,
            log_every=1,
            pause_at=lambda number: number in (4, 7),
            on_pause=lambda number, state: paused.append(number) or {},
            after_pause=lambda number, state: paused.append(number),
            on_progress=lambda progress: reported.append(progress.step),
        )
    assert info.value.exit_code == DIVERGED
    assert paused == [4, 4]
    assert reported == [1, 2, 3, 4, 5]
    assert step.started[-1] <= 6 + RUN_AHEAD


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_divergence_whatever_the_loss(norm):
    step = PretendStep(norms={6: norm})
    with pytest.raises(Diverged, match=rf"Step 6: the loss is 106\.0 and the norm of the gradients {norm}\."):
        run_steps(step, first_state(), [{}] * 20, log_every=1)
    assert step.started[-1] <= 6 + RUN_AHEAD


def test_what_strategies_keep_is_checked_at_the_pause_too():
    """The last update of local steps shows in a group's copy alone, which the shared parameters meet later."""

    def step(state, batch):
        number = int(state.step) + 1
        copies = {"w": jnp.full((2,), np.inf if number == 4 else 1.0)}
        extra = Copies(copies, {"w": jnp.zeros(2)})
        return first_state(number)._replace(extra=extra), StepMetrics(Late(1.0), Late(1.0), Late(10.0))

    paused = []
    with pytest.raises(Diverged, match=r"Step 4: what strategy\.data .*\(TrainState\.extra\.copies\) is not finite"):
        run_steps(
            step,
            first_state(),
            [{}] * 4,
            pause_at=lambda number: number % 2 == 0,
            on_pause=lambda number, state: paused.append(number) or {},
        )
    assert paused == [2]


def test_an_update_that_spoils_the_parameters_is_found_at_the_pause():
    step, paused = PretendStep(params={4: float("nan")}), []
    with pytest.raises(Diverged, match="Step 4: the parameters are not finite after its update"):
        run_steps(
            step,
            first_state(),
            [{}] * 4,
            pause_at=lambda number: number % 2 == 0,
            on_pause=lambda number, state: paused.append(number) or {},
            after_pause=lambda number, state: paused.append(number),
        )
    assert paused == [2, 2]


# From plain Python, with arrays in memory.


def batches(num_steps: int):
    random = np.random.default_rng(0)
    for number in range(num_steps):
        yield {
            "inputs": random.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "targets": random.integers(CLASSES, size=ROWS).astype(np.int32),
            "weights": np.ones(ROWS, np.float32),
            "example": np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int32),
        }


@pytest.fixture(scope="module")
def model():
    return mlp(MLPConfig(features=FEATURES, classes=CLASSES, widths=(1024,)))


def trained(model, strategy, **options):
    layouts = spmdkit.lay_out(model, strategy, **options)
    step = spmdkit.build_step(model, optax.adamw(3e-3), layouts)
    seen = []
    state = spmdkit.run_steps(
        step, step.init(seed=0), batches(3), log_every=1, on_progress=lambda progress: seen.append(progress.loss)
    )
    return state, seen, layouts


@pytest.fixture(scope="module")
def alone(model):
    """The same on one device."""
    state, losses, _ = trained(model, spmdkit.DeviceMesh.of(["cpu:0"]))
    return jax.device_get(state.params), losses


def test_the_readme_lines(model, alone):
    mesh = spmdkit.DeviceMesh.simulated(8, data=2, fsdp=4)
    layouts = spmdkit.lay_out(model, mesh)
    step = spmdkit.build_step(model, optax.adamw(3e-3), layouts)
    state = spmdkit.run_steps(step, step.init(seed=0), batches(3))
    assert int(state.step) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, alone[0])


def test_distributions_stand_where_a_mesh_does(model, alone):
    mesh = spmdkit.DeviceMesh((8,), ("batch",), [f"cpu:{index}" for index in range(8)])
    grid = spmdkit.DeviceMesh((4, 2), ("batch", "model"), [f"cpu:{index}" for index in range(8)])
    layout_map = spmdkit.LayoutMap(grid)
    layout_map["layers/0/kernel"] = (None, "model")
    layout_map["layers/0/bias"] = ("model",)
    layout_map["layers/1/kernel"] = ("model", None)
    distributions = [
        spmdkit.DataParallel(device_mesh=mesh),
        spmdkit.ModelParallel(layout_map=layout_map, batch_dim_name="batch"),
    ]
    for distribution, shard in zip(distributions, [(FEATURES, 1024), (FEATURES, 512)], strict=True):
        state, losses, _ = trained(model, distribution)
        np.testing.assert_allclose(losses, alone[1], rtol=1e-5)
        assert state.params["layers"][0]["kernel"].addressable_shards[0].data.shape == shard


def test_evaluation_weighs_rows(model):
    layouts = spmdkit.lay_out(model, {"data": 8})
    step = spmdkit.build_step(model, optax.sgd(0.1), layouts)
    params = step.init(seed=0).params
    whole = next(batches(1))
    padded = {**whole, "weights": (np.arange(ROWS) < 5).astype(np.float32)}
    found = evaluate(step, params, [whole, padded])
    total, weight = model.loss(jax.device_get(params), {name: jnp.asarray(leaf) for name, leaf in whole.items()}, None)
    few, fewer = model.loss(jax.device_get(params), {name: jnp.asarray(leaf) for name, leaf in padded.items()}, None)
    assert found == pytest.approx(float((total + few) / (weight + fewer)), rel=1e-5)


def test_nothing_to_evaluate(model):
    step = spmdkit.build_step(model, optax.sgd(0.1), spmdkit.lay_out(model, {"data": 8}))
    empty = {**next(batches(1)), "weights": np.zeros(ROWS, np.float32)}
    for nothing in ([], [empty]):
        with pytest.raises(ValueError, match=r"nothing to evaluate: .* Raise data\.eval_fraction"):
            evaluate(step, step.init(seed=0).params, nothing)


def test_steps_that_are_not_finite_may_pass_so_many_in_a_row():
    step, reported, told = PretendStep(losses={3: np.nan, 4: np.nan, 6: np.inf}), [], []
    options = {"log_every": 1, "on_progress": reported.append, "most_skipped": 2}
    run_steps(step, first_state(), [{}] * 8, on_skip=lambda number, found: told.append((number, found)), **options)
    assert [progress.step for progress in reported] == [1, 2, 5, 7, 8]
    assert [progress.extra.get("skipped") for progress in reported] == [None, None, 2.0, 3.0, 3.0]
    assert [number for number, _ in told] == [3, 4, 6]
    assert told[0][1] == "the loss is nan and the norm of the gradients 1.0"


def test_one_more_in_a_row_ends_the_training():
    step = PretendStep(norms={3: np.nan, 4: np.nan, 5: np.nan})
    with pytest.raises(Diverged, match=r"Step 5: .*norm of the gradients nan\. It is number 3 in a row, of at most 2"):
        run_steps(step, first_state(), [{}] * 8, most_skipped=2)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1, [(1, 101, None), (2, 101, 2.0), (3, 103, None), (4, 103, 4.0), (5, 105, None), (6, 106, 6.0)]),
        (10, [(2, 101, 2.0), (4, 103, 4.0), (6, 106, 6.0)]),
    ],
)
def test_an_evaluation_after_a_step_that_was_left_out_keeps_its_step(every, expected):
    step, reported = PretendStep(losses={2: np.nan, 4: np.nan}), []
    run_steps(
        step,
        first_state(),
        [{}] * 6,
        log_every=every,
        on_progress=reported.append,
        pause_at=lambda number: number % 2 == 0,
        on_pause=lambda number, state: {"eval_loss": float(number)},
        most_skipped=1,
    )
    assert [(each.step, each.loss, each.extra.get("eval_loss")) for each in reported] == expected
    assert [each.extra["skipped"] for each in reported if each.step in (2, 4, 6)] == [1.0, 2.0, 2.0]


def test_the_last_step_is_left_out_and_evaluated():
    reported = []
    run_steps(
        PretendStep(losses={1: np.nan, 3: np.nan}),
        first_state(),
        [{}] * 3,
        on_progress=reported.append,
        pause_at=lambda number: number != 2,
        on_pause=lambda number, state: {"eval_loss": float(number)},
        most_skipped=1,
    )
    assert [(each.step, each.loss, each.extra["eval_loss"]) for each in reported] == [(3, 102, 3.0)]
