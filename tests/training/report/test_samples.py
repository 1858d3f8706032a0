"""What the model wrote: the last text in sight, those before it folded, markup stays text."""

from report_page import Page
from spmdkit.training.report.samples import MAX_SAMPLES, samples_section

TEXTS = [{"step": 10 * number, "text": f"text {number}"} for number in range(1, 4)]


def test_the_last_is_in_sight_and_the_others_fold():
    page = Page(samples_section("at the end <b>", TEXTS))
    assert page.texts["pre"][0] == "at the end <b>"
    assert page.text("summary") == "3 samples on the way there"
    assert page.text("card samples").count("text ") == 3
    without_end = Page(samples_section(None, TEXTS))
    assert without_end.texts["pre"][0] == "text 3"
    assert without_end.text("card samples").count("text ") == 2


def test_of_very_many_some_are_shown():
    many = [{"step": number, "text": f"text {number}"} for number in range(1000)]
    shown = Page(samples_section("end", many)).texts["h3"]
    assert len(shown) == MAX_SAMPLES
    assert (shown[0], shown[-1]) == ("at step 0", "at step 999")


def test_nothing_written_is_no_section():
    assert samples_section(None, []) == samples_section("", [{"step": 1}, {"text": "x"}]) == ""
