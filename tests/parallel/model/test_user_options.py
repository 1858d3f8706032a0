"""Options in a config for a user's function or class, checked before it is called."""

import dataclasses
from functools import partial

import pytest
from spmdkit.mesh import UserError
from spmdkit.parallel.model.user_options import find_parameters, takes_option, with_options


def make(width, *, vocabulary=0, depth=1):
    return {"width": width, "vocabulary": vocabulary, "depth": depth}


def names(function):
    taken = find_parameters(function)
    return taken.names, taken.takes_any


def problems(function, options, **more):
    with pytest.raises(UserError) as error:
        with_options(function, options, {}, "model", **more)()
    return str(error.value).splitlines()


def test_passes_options_and_values_of_the_run():
    offered = {"vocabulary": 256, "length": 32, "depth": None}
    assert with_options(make, {"width": 3}, offered, "model")() == {"width": 3, "vocabulary": 256, "depth": 1}
    assert with_options(make, {"width": 3, "vocabulary": 5}, offered, "model")()["vocabulary"] == 5


def test_reports_all_wrong_options_at_once():
    assert problems(make, {"detph": 2, "x": 1}) == [
        "model.detph is not an option of make. Did you mean depth?",
        "model.x is not an option of make. The options are width, vocabulary, depth.",
        "model.width is required: make lacks a default for it.",
    ]
    assert problems(lambda: 0, {"x": 1}) == ["model.x is not an option of <lambda>. The options are none."]


def test_proposes_other_keys_of_the_section():
    (message,) = problems(make, {"width": 1, "losss": "x"}, beside=("loss",))
    assert message.startswith("model.losss is not an option of make. Did you mean loss?")


def test_keyword_arguments_take_any_option():
    assert with_options(lambda **options: options, {"a": 1}, {"length": 2}, "model")() == {"a": 1}


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
def test_finds_the_parameters_of_functions_and_classes(function, expected):
    assert names(function) == expected


def test_unknown_signatures_have_no_options():
    assert takes_option(Other, "key")
    assert not takes_option(dict.fromkeys, "iterable")
    assert not takes_option(3, "real")


def test_partial_applications_supply_required_options():
    assert with_options(partial(Other, width=3), {"key": 1}, {}, "model")().width == 3
    assert problems(partial(Other, key=3), {}) == ["model.width is required: Other lacks a default for it."]


@pytest.mark.parametrize(
    ("value", "got"), [("64", "'64' (string)"), (True, "True (boolean)"), (2.5, "2.5 (number)"), ([3], "[3] (list)")]
)
def test_rejects_types_that_differ_from_annotations(value, got):
    expected = f"model.width must be an integer, got {got}: Fields takes width: int."
    assert problems(Fields, {"width": value}) == [expected]
    (message,) = problems(Fields, {"width": 3, "rate": "no"})
    assert message == "model.rate must be a number or null, got 'no' (string): Fields takes rate: float | None."


@pytest.mark.parametrize("value", ["10", "-1", "0.5", "1e-3"])
def test_rejects_a_number_in_quotes_for_a_parameter_without_an_annotation(value):
    def plain(classes, *, name="", text: str = "", words: list[str] | None = None):
        return classes

    assert problems(plain, {"classes": value}) == [
        f"model.classes is the text {value!r}, because it is in quotes. Remove them to pass a number; if plain takes "
        "text, annotate it: classes: str."
    ]
    for takes_text in ("name", "text", "words"):
        assert with_options(plain, {"classes": 10, takes_text: value}, {}, "model")() == 10
    assert with_options(plain, {"classes": "ten"}, {}, "model")() == "ten"


@pytest.mark.parametrize("options", [{"width": 3}, {"width": 3.0, "rate": 1}, {"width": 0, "rate": None}])
def test_accepts_the_types_of_annotations(options):
    assert with_options(Fields, options, {}, "model")() == Fields(**options)


def test_ignores_other_annotations():
    def plain(a: "int | list" = 0, b: dict | None = None, c: "Fields" = None):
        return a, b, c

    assert with_options(plain, {"a": "x", "b": 3, "c": 4}, {}, "model")() == ("x", 3, 4)


def test_parameters_passed_later_are_not_options():
    made = with_options(Other, {"width": 3}, {"key": 5}, "model", later=("key",))
    assert (made(key=7).width, made(key=7).key) == (3, 7)
    with pytest.raises(UserError, match=r"model.key is not an option of Other. The options are width"):
        with_options(Other, {"width": 3, "key": 1}, {}, "model", later=("key",))
    with pytest.raises(UserError, match=r"model.width is not an option of Other. The options are none"):
        with_options(Other, {"width": 3}, {}, "model", later=("key",), hidden=("width",))
