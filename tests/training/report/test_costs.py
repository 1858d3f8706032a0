"""What the report shows of a step: memory, collectives beside the prediction, the pipeline's schedule."""

from report_page import COLLECTIVES, COSTS, Page
from spmdkit.parallel.collectives import Collective
from spmdkit.training.report.costs import costs_sections


def test_memory_is_written_in_prefixed_bytes():
    page = Page(costs_sections(COSTS))
    assert page.text("amounts") == (
        "parameters804.5 KiBoptimizer1.6 MiBbatch6 KiB"
        "arguments3 MiBoutputs2 MiBtemporaries24 MiBaliased2 MiBtotal27 MiB"
    )
    assert page.text("total") == "total27 MiB"


def test_collectives_as_predicted_are_one_table():
    html = costs_sections(COSTS)
    page = Page(html)
    assert html.count('<table class="collectives">') == 1
    assert page.text("good") == "exactly as the strategies predict"
    assert "all-gatherfsdp1,0576 MiB" in page.text("collectives")
    assert "all-reducedata × fsdp24.5 KiB" in page.text("collectives")
    assert not page.text("off")


def test_collectives_that_differ_stand_beside_the_prediction():
    found = (*COLLECTIVES[:2], Collective("all-gather", ("data",), 3, 1 << 20))
    html = costs_sections(COSTS._replace(found=found))
    page = Page(html)
    assert html.count('<table class="collectives">') == 2
    assert page.text("bad") == "not as the strategies predict"
    assert page.text("off") == "all-gatherdata31 MiBcollective-permutepipe664 MiB"
    assert "The compiled step, 1,062 collectives" in page.text("h3")
    assert "The strategies predict, 1,125 collectives" in page.text("h3")


def test_what_is_left_to_xla_is_no_difference_and_what_is_one_is_told():
    found = (*COLLECTIVES, Collective("all-to-all", ("tensor",), 3, 1 << 20))
    page = Page(costs_sections(COSTS._replace(found=found, unexpected=())))
    assert page.text("good") == "as the strategies predict, beside what is left to XLA"
    page = Page(costs_sections(COSTS._replace(found=found, unexpected=("all-to-all over <tensor>: none predicted",))))
    assert page.text("bad") == "not as the strategies predict"
    assert "Not as predicted: all-to-all over <tensor>: none predicted" in page.text("note")


def test_a_step_without_collectives_says_so():
    page = Page(costs_sections(COSTS._replace(found=(), predicted=())))
    assert page.text("collectives") == "none: nothing is sent between devices"
    assert "bytes" not in page.text("note")


def test_notes_are_told():
    page = Page(costs_sections(COSTS._replace(notes=("On simulated devices it is <another> program.",))))
    assert "Note: On simulated devices it is <another> program." in page.text("note")


def test_a_schedule_is_a_picture_and_a_large_one_words():
    drawn = costs_sections(COSTS._replace(schedule_svg="<svg></svg>", schedule_text="bubble 27 %"))
    assert '<template shadowrootmode="open"><svg></svg></template>' in drawn
    assert "bubble" not in drawn
    told = costs_sections(COSTS._replace(schedule_text="bubble 27 %"))
    assert Page(told).text("pre") == "bubble 27 %"
    assert "Schedule" not in costs_sections(COSTS)
