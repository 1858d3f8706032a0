"""Numbers, lists and addresses of variables; what cannot be read is refused with the variable's name."""

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.joining.addresses import Address
from spmdkit.mesh.joining.facts import Facts, first_set, from_addresses, number, numbered, numbers, present

LONG = "9" * 500


@pytest.mark.parametrize(("text", "found"), [("3", 3), (" 12 ", 12), ("0", 0), ("", None), (None, None)])
def test_numbers_as_they_are_set(text, found):
    assert number({} if text is None else {"RANK": text}, "RANK", 0) == found


@pytest.mark.parametrize("text", ["four", "-1", "1.0", "1e3", "٣", LONG, "0x2", "1,2"])
def test_what_is_no_number(text):
    with pytest.raises(UserError, match=r"variable RANK='.{,60}' must be a whole number of at least 0"):
        number({"RANK": text}, "RANK", 0)


def test_a_number_that_is_too_small():
    with pytest.raises(UserError, match="SIZE='0' must be a whole number of at least 1"):
        number({"SIZE": "0"}, "SIZE", 1)


@pytest.mark.parametrize(("text", "found"), [("0", (0,)), ("3, 0", (3, 0)), ("", None)])
def test_lists_of_numbers(text, found):
    assert numbers({"DEVICES": text}, "DEVICES") == found


@pytest.mark.parametrize("text", ["0,", "a,b", "0-3", LONG])
def test_what_is_no_list(text):
    with pytest.raises(UserError, match=r"DEVICES='.{,60}' must be whole numbers between commas"):
        numbers({"DEVICES": text}, "DEVICES")


def test_facts_say_the_variables_that_are_set():
    environ = {"SIZE": "4", "RANK": "2", "LOCAL": ""}
    names = {"num_processes": "SIZE", "process_id": "RANK", "local_rank": "LOCAL"}
    facts = numbered("MPI", names, environ)
    assert facts == Facts("MPI", num_processes=4, process_id=2, said={"num_processes": "SIZE", "process_id": "RANK"})
    assert facts.is_whole
    assert not facts._replace(process_id=None).is_whole
    assert present({}, names) is None
    assert first_set(environ, "LOCAL", "RANK", "SIZE") == "RANK"


def test_addresses_of_all_say_how_many_there_are():
    facts = from_addresses("here", "a:1,b:2", None, 1, "ADDRESSES", {})
    assert (facts.address, facts.num_processes, facts.hosts) == (Address("a", 1), 2, ("a", "b"))
    assert facts.said == {"num_processes": "ADDRESSES"}
    alone = from_addresses("here", "a:1", 3, 1, "ADDRESSES", {})
    assert (alone.num_processes, alone.hosts) == (3, ())
    with pytest.raises(UserError, match=r"has 2 jobs, but num_processes is 3\. Give one address per process"):
        from_addresses("here", "a:1,b:2", 3, 1, "ADDRESSES", {})
