"""Options of a config for a user's function or class: told what is wrong before it is called."""

import dataclasses
import re
from functools import partial

import pytest
from spmdkit.mesh import UserError
from spmdkit.mesh.user_options import call_with_options, taken_by, takes_option, with_options


def make(width, *, vocabulary=0, depth=1):
    return {"width": width, "vocabulary": vocabulary, "depth": depth}


def names(function):
    taken = taken_by(function)
    return taken.names, taken.takes_any


def problems(function, options, **more):
    with pytest.raises(UserError) as error:
        call_with_options(function, options, {}, "model", **more)
    return str(error.value).splitlines()


def test_options_and_what_the_run_knows():
    offered = {"vocabulary": 256, "length": 32, "depth": None}
    assert call_with_options(make, {"width": 3}, offered, "model") == {"width": 3, "vocabulary": 256, "depth": 1}
    assert call_with_options(make, {"width": 3, "vocabulary": 5}, offered, "model")["vocabulary"] == 5


def test_all_wrong_options_at_once():
    assert problems(make, {"detph": 2, "x": 1}) == [
        "model.detph is not an option. Did you mean model.depth? The options of make are width, vocabulary, depth.",
        "model.x is not an option. The options of make are width, vocabulary, depth.",
        "model.width has to be given: make has no default for it.",
    ]
    assert problems(lambda: 0, {"x": 1}) == ["model.x is not an option. <lambda> has no options."]


def test_other_keys_of_the_section_may_be_meant():
    (told,) = problems(make, {"width": 1, "losss": "x"}, beside=("loss",))
    assert told == (
        "model.losss is not an option. Did you mean model.loss? The options of make are width, vocabulary, depth."
    )


def test_keyword_arguments_take_any_option():
    assert call_with_options(lambda **options: options, {"a": 1}, {"length": 2}, "model") == {"a": 1}


class CallsItself(type):
    """As the metaclasses of Flax and Equinox."""

    def __call__(cls, *arguments, **options):
        return super().__call__(*arguments, **options)


class Base:
    """As the layers of Keras."""

    def __new__(cls, *arguments, **options):
        return super().__new__(cls)

    def __init__(self, *, dtype=None, **options):
        if options:
            raise ValueError(f"Unrecognized: {options}")


class Layer(Base):
    def __init__(self, width, depth=2, **options):
        super().__init__(**options)
        self.width = width


class Other(metaclass=CallsItself):
    def __init__(self, width, *, key):
        self.width, self.key = width, key


@dataclasses.dataclass
class Fields:
    width: int
    rate: "float | None" = None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (make, (["width", "vocabulary", "depth"], False)),
        (partial(make, depth=3), (["width", "vocabulary", "depth"], False)),
        (partial(make, 4), (["vocabulary", "depth"], False)),
        (Other, (["width", "key"], False)),
        (partial(Other, width=3), (["width", "key"], False)),
        (Layer, (["width", "depth", "dtype"], True)),
        (Fields, (["width", "rate"], False)),
        (Layer(3).__init__, (["width", "depth"], True)),
        (object, ([], False)),
    ],
)
def test_what_a_function_or_a_class_takes(function, expected):
    assert names(function) == expected


def test_functions_that_tell_nothing_take_no_option():
    assert takes_option(Other, "key")
    assert not takes_option(dict.fromkeys, "iterable")
    assert not takes_option(3, "real")


def test_what_a_partial_application_gives_need_not_be_given():
    assert call_with_options(partial(Other, width=3), {"key": 1}, {}, "model").width == 3
    assert problems(partial(Other, key=3), {}) == ["model.width has to be given: Other has no default for it."]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"width": "64"}, "model.width='64' must be a whole number: Fields takes width: int."),
        ({"width": True}, "model.width=True must be a whole number: Fields takes width: int."),
        ({"width": 2.5}, "model.width=2.5 must be a whole number: Fields takes width: int."),
        ({"width": [3]}, "model.width=[3] must be a whole number: Fields takes width: int."),
        ({"width": 3, "rate": "no"}, "model.rate='no' must be a number or null: Fields takes rate: float | None."),
    ],
)
def test_types_that_an_annotation_says(options, told):
    assert problems(Fields, options) == [told]


@pytest.mark.parametrize("options", [{"width": 3}, {"width": 3.0, "rate": 1}, {"width": 0, "rate": None}])
def test_types_that_are_right(options):
    assert call_with_options(Fields, options, {}, "model") == Fields(**options)


def test_annotations_of_anything_else_are_not_looked_at():
    def plain(a: "int | list" = 0, b: dict | None = None, c: "Fields" = None):
        return a, b, c

    assert call_with_options(plain, {"a": "x", "b": 3, "c": 4}, {}, "model") == ("x", 3, 4)


def test_what_is_doubtful_is_told_once_it_has_failed():
    def doubling(width=3, name="a"):
        return [0][width + 1]

    (told,) = problems(doubling, {"width": "64", "name": "b"})
    assert re.search(r"line \d+ \(return \[0\]\[width \+ 1\]\): TypeError: .*", told)
    assert told.endswith(" model.width='64' is text, and its default, 3, a whole number.")
    (told,) = problems(doubling, {"width": 5})
    assert told.endswith("IndexError: list index out of range")


def test_misspelled_options_of_a_class_that_passes_them_on():
    assert problems(Layer, {"widht": 3}) == [
        "model.width has to be given: Layer has no default for it. Is model.widht meant to be model.width?"
    ]
    (told,) = problems(Layer, {"width": 3, "depht": 3})
    assert "ValueError: Unrecognized: {'depht': 3}. Is model.depht meant to be model.depth?" in told


def test_what_comes_later_is_no_option_and_need_not_be_given():
    made = with_options(Other, {"width": 3}, {"key": 5}, "model", later=("key",))
    assert (made(key=7).width, made(key=7).key) == (3, 7)
    with pytest.raises(UserError, match=r"model.key is not an option. The options of Other are width"):
        with_options(Other, {"width": 3, "key": 1}, {}, "model", later=("key",))
    with pytest.raises(UserError, match=r"model.width is not an option. Other has no options"):
        with_options(Other, {"width": 3}, {}, "model", later=("key",), hidden=("width",))
