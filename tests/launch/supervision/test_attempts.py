from spmdkit.launch.supervision.attempts import remove_new


def test_the_logs_of_a_mistake_are_removed_and_no_others(tmp_path):
    logs = tmp_path / "runs" / "new" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("error")
    assert not remove_new([], logs)  # they were there before
    (logs.parent / "config.yaml").write_text("")
    assert not remove_new([logs, logs.parent], logs)  # the run has started
    assert logs.is_dir()
    (logs.parent / "config.yaml").unlink()
    (tmp_path / "runs" / "other").mkdir()
    assert remove_new([logs, logs.parent, tmp_path / "runs"], logs)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
