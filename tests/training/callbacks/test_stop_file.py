from play import play
from spmdkit.training.callbacks.stop_file import StopFile


def test_a_file_ends_the_run_once(tmp_path):
    class Touching:
        def on_step_begin(self, run):
            if run.step == 3:
                (run.folder / "stop").touch()

    played = play(Touching(), StopFile(seconds=0), folder=tmp_path)
    assert (played.step, played.ended.end, list(played.saved)) == (4, "interrupted", [4])
    assert played.ended.reason == f"the file {tmp_path}/stop"
    assert not (tmp_path / "stop").exists()
    assert play(StopFile(seconds=0), folder=tmp_path, start=4).step == 12


def test_it_is_looked_for_now_and_then(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("pathlib.Path.exists", lambda path: looks.append(path))
    play(StopFile(seconds=60), folder=tmp_path)
    assert looks == [tmp_path / "stop"]
