"""What is asked for adds up, and comes through as text."""

from spmdkit.training.callbacks.asks import Asks


def test_nothing_is_nothing():
    assert not Asks()
    assert Asks.read([]) == Asks()
    assert not (Asks() | Asks())


def test_all_of_it_is_done_and_the_first_end_counts():
    both = Asks(end="interrupted", reason="a file", evaluate=True, factor=0.5) | Asks(
        end="finished", reason="enough", save=True, factor=0.5
    )
    assert both == Asks(end="interrupted", reason="a file", evaluate=True, save=True, factor=0.25)


def test_it_comes_through_as_text():
    asks = [Asks(save=True, factor=0.1), Asks(end="finished", reason='it is "done"')]
    assert Asks.read(each.text() for each in asks) == asks[0] | asks[1]


def test_of_two_factors_of_a_part_the_last_counts():
    asks = [Asks(parts={"body": 0.5, "head": 1.0}), Asks(parts={"body": 0.0})]
    assert Asks.read(each.text() for each in asks) == Asks(parts={"body": 0.0, "head": 1.0})
    assert Asks(parts={"body": 0.0})
