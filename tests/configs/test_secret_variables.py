"""Environment variables with names of secrets: their values are written nowhere."""

import json
import stat

import pytest
import yaml
from spmdkit.configs import ConfigError, load_config, resolved_yaml
from spmdkit.configs.secret_variables import is_secret, redact, redact_config, redact_override, resolve
from spmdkit.launch import slurm
from spmdkit.launch.cli import main
from spmdkit.launch.launchers import LaunchRequest, find_launcher
from spmdkit.mesh.errors import UserError
from spmdkit.report.run_record import read_run
from support.runs import write_config

VALUE = "hf_s3cr3t"
SECTION = f"launch.environment={{HF_TOKEN: {VALUE}, NCCL_DEBUG: WARN}}"


def test_redacts_only_secrets():
    secrets = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_KEY", "PGPASSWORD", "DB_PASS", "SECRET2", "hf_token"]
    secrets += ["DB_PWD", "MYSQL_PWD", "DBPWD", "AWS_CREDENTIALS", "GIT_CREDS", "DOOR_PASSCODE"]
    others = ["PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "NCCL_BYPASS", "KEYBOARD"]
    assert [name for name in (*secrets, *others) if is_secret(name)] == secrets
    assert redact(dict.fromkeys(secrets + others, VALUE)) == dict.fromkeys(secrets) | dict.fromkeys(others, VALUE)


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        (f"launch.environment.HF_TOKEN={VALUE}", "launch.environment.HF_TOKEN=null"),
        (SECTION, 'launch.environment={"HF_TOKEN": null, "NCCL_DEBUG": "WARN"}'),
        (f"launch={{environment: {{HF_TOKEN: {VALUE}}}}}", 'launch={"environment": {"HF_TOKEN": null}}'),
        (f"launch.environment={{HF_TOKEN: {VALUE}", "launch.environment=<redacted>"),
        ("launch.environment.NCCL_DEBUG=INFO", "launch.environment.NCCL_DEBUG=INFO"),
        ("launch.environment={A: 0x1F}", "launch.environment={A: 0x1F}"),
        ("model.key_bias=true", "model.key_bias=true"),
        ("launch", "launch"),
    ],
)
def test_redacts_overrides(given, safe):
    assert redact_override(given) == safe


def test_written_config_has_no_values_of_secrets(tmp_path):
    config = load_config(write_config(tmp_path), [SECTION])
    text = resolved_yaml(config)
    assert VALUE not in text
    assert yaml.safe_load(text)["launch"]["environment"] == {"HF_TOKEN": None, "NCCL_DEBUG": "WARN"}
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml").launch.environment == {"HF_TOKEN": None, "NCCL_DEBUG": "WARN"}


def test_null_resolves_to_the_value_of_the_shell(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", VALUE)
    assert resolve({"HF_TOKEN": None, "A": "b"}) == {"HF_TOKEN": VALUE, "A": "b"}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"takes HF_TOKEN from the shell, which does not set it. Set it \(export HF"):
        resolve({"HF_TOKEN": None})


@pytest.mark.parametrize(
    "given",
    ["launch.environment={HF_TOKEN: [hf_s3cr3t]}", "launch.environment={HF_TOKEN: hf_s3cr3t", "launch.environment"],
)
def test_error_messages_hide_secrets(given, tmp_path):
    with pytest.raises(ConfigError) as raised:
        load_config(write_config(tmp_path), [given])
    assert VALUE not in str(raised.value)
    path = write_config(tmp_path, launch={"environment": {"HF_TOKEN": [VALUE], "A": "b"}})
    with pytest.raises(ConfigError, match=r"launch.environment.HF_TOKEN must be a string, got a list.$"):
        load_config(path)


@pytest.mark.parametrize("on", ["local:2x4", "ssh:hosts.yaml", "slurm", "mpi"])
def test_dry_run_passes_secrets_by_name(on, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hosts = {"hosts": ["gpu1"], "processes": 2}
    (tmp_path / "hosts.yaml").write_text(json.dumps(hosts))
    config = write_config(tmp_path, launch={"processes_per_node": 2})
    printed = cli(0, "launch", config, SECTION, "run.simulate=4", "--on", on, "--dry-run").out
    assert VALUE not in printed
    if on.startswith(("ssh", "mpi")):
        assert 'HF_TOKEN="$HF_TOKEN"' in printed
        assert "NCCL_DEBUG=WARN" in printed


def test_sbatch_gets_secrets_in_its_environment(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm, "submit", lambda path, variables: given.update(variables) or "7")
    config = write_config(tmp_path, launch={"processes_per_node": 2})
    assert slurm.launch(LaunchRequest(str(config), (SECTION, "run.simulate=4")), find_launcher("slurm")[1]) == 0
    assert given == {"HF_TOKEN": VALUE}
    script = tmp_path / "run" / "slurm.sh"
    assert VALUE not in script.read_text()
    assert "HF_TOKEN of launch.environment must be set" not in script.read_text()
    assert '[ -n "${HF_TOKEN+set}" ] || {' in script.read_text()
    assert stat.S_IMODE(script.stat().st_mode) == 0o600


def test_report_hides_secrets_of_an_edited_config(tmp_path):
    (tmp_path / "config.yaml").write_text(f"launch: {{environment: {{HF_TOKEN: {VALUE}}}}}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert read_run(tmp_path).config == {"launch": {"environment": {"HF_TOKEN": None}}}
    assert redact_config(None) is None


@pytest.mark.slow
def test_no_file_of_a_run_contains_secrets(tmp_path):
    config = write_config(
        tmp_path, launch={"environment": {"HF_TOKEN": VALUE}}, run={"simulate": 8, "dir": str(tmp_path / "run")}
    )
    assert main(["train", str(config), f"launch.environment.WANDB_API_KEY={VALUE}", "train.steps=2"]) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html"} <= {path.name for path in files}
    assert [path for path in files if VALUE.encode() in path.read_bytes()] == []
    assert stat.S_IMODE((tmp_path / "run" / "config.yaml").stat().st_mode) == 0o600
