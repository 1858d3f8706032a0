"""report.html from a folder: what is known is shown, the rest is left out, and the file is replaced as a whole."""

from spmdkit.launch.reporting.record import read_run
from spmdkit.launch.reporting.renew import renew


def test_it_shows_what_the_folder_says(leave):
    folder = leave()
    (folder / "samples.jsonl").write_text('{"step": 5, "text": "what it wrote"}\n')
    assert renew(read_run(folder)) == folder / "report.html"
    html = (folder / "report.html").read_text(encoding="utf-8")
    for part in (
        "step 10 of 10 · 8 cuda devices: data 2 × fsdp 4",
        "what it wrote",
        "not as the strategies predict",
        "a schedule",
        "Layout of every parameter",
        "goodput 75.0 % of 4.0 s",
    ):
        assert part in html, part
    assert not list(folder.glob("*.partial"))


def test_without_report_json_the_rest_is_shown(leave, tmp_path):
    page = renew(read_run(leave(facts=False)), tmp_path / "page.html")
    html = page.read_text(encoding="utf-8")
    assert "<b>Loss</b>" in html
    assert "Layout of every parameter" not in html
    assert not (tmp_path / "run" / "report.html").exists()
