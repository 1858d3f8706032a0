import pytest
from spmdkit.configs import load_config
from spmdkit.launch.pods.names import MOST_NAME, as_label, is_label, is_subdomain, job_name


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("run", "run"),
        ("My Run_2", "my-run-2"),
        ("7b.fsdp", "run-7b-fsdp"),
        ("--", "run"),
        ("", "run"),
        ("größe", "gr-e"),
        ("a" * 26, "a" * 26),
    ],
)
def test_labels(text, label):
    assert as_label(text, 26) == label
    assert is_label(label, 26)


def test_long_names_stay_apart():
    one, other = (as_label("a-very-long-name-of-a-run-" + end, 26) for end in ("one", "two"))
    assert one != other
    assert len(one) <= 26
    assert is_label(one)


def test_what_is_none():
    assert not any(is_label(text) for text in ("", "7b", "a-", "-a", "A", "a.b", "a" * 64))
    assert is_subdomain("team-a.example.org")
    assert not any(is_subdomain(text) for text in ("", "A", ".a", "a/b", "a" * 254))


def test_names_fit(config, tmp_path):
    assert job_name(config()) == "my-run"
    long = load_config(tmp_path / "tiny.yaml", [f"run.dir={'x' * 100}"], num_processes=None)
    assert len(job_name(long)) == MOST_NAME
    assert job_name(config(kubernetes={"name": "seven"})) == "seven"
    label = f"{job_name(long)}-host-0-0.{job_name(long)}"
    assert len(label) <= 63, "JobSet's label of the coordinator"
