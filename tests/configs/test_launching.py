"""The section `launch`: what is refused before anything is started or submitted."""

import pytest
from spmdkit.configs import load_config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.time=soon", "launch.time='soon' is no time limit. Give hours:minutes:seconds such as '12:00:00'"),
        ("launch.time='1:99:00'", "is no time limit"),
        ("launch.environment={A B: x}", "launch.environment: 'A B' is no name of an environment variable"),
        ('launch.environment={A: "x\\ny"}', "launch.environment.A must be text without control characters"),
        ("launch.slurm.options=['-C h100']", "launch.slurm.options: '-C h100' must be one long option with its value"),
        ("launch.slurm.options=['#SBATCH']", "must be one long option"),
        ("launch.slurm.srun_options=[label]", "launch.slurm.srun_options: 'label' must be one long option"),
        ('launch.setup=["a\\nb"]', "launch.setup must be text without control characters"),
        ("launch.nodes=0", "launch.nodes must be at least 1"),
        ("launch.slurm.warn_seconds=70000", "launch.slurm.warn_seconds must be at most 65535"),
    ],
)
def test_what_is_refused(override, message):
    with pytest.raises(ValueError) as caught:
        load_config("quickstart", [override])
    assert message in str(caught.value)


@pytest.mark.parametrize("time", ["90", "12:00:00", "1-00:00:00", "2-12", "30:00"])
def test_time_limits(time):
    assert load_config("quickstart", [f"launch.time='{time}'"]).launch.time == time


def test_as_many_processes_as_the_section_says():
    sizes = ["launch.nodes=2", "launch.processes_per_node=4"]
    assert load_config("quickstart", [*sizes, "run.simulate=1"], num_processes=None).launch.num_processes == 8
    with pytest.raises(ValueError, match="8 processes with 8 devices each give 64"):
        load_config("quickstart", sizes, num_processes=None)


def test_gpus_are_devices():
    words = ["run.simulate=0", "launch.nodes=2", "launch.gpus_per_process=4"]
    load_config("quickstart", words, num_processes=None)
    with pytest.raises(ValueError, match="gives 4 GPUs"):
        load_config("quickstart", [*words[:2], "launch.gpus_per_process=2", "strategy.data=8"], num_processes=None)
