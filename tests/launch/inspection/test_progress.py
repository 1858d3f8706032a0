from spmdkit.launch.inspection import progress


def test_it_speaks_seldom(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    counted = progress.Progress("step 4", 4096)
    for number in range(8):
        now[0] = float(number)
        counted.add(512)
    assert capsys.readouterr().err == "step 4: 3 KiB of 4 KiB\n"
