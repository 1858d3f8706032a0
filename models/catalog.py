"""Models by their name in a config: the reference models, or the user's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..mesh.errors import UserError, did_you_mean, raise_problems, unknown_options
from ..mesh.files import is_url
from ..mesh.keys import make_key
from ..parallel.model import BlockModel, Model, Params
from ..parallel.model.arguments import EXPECTED, as_model
from ..parallel.model.user_code import import_named
from ..parallel.model.user_options import takes_option, with_options
from .adapters.libraries import library_of, library_of_class, made_with, makes_modules
from .adapters.library_model import OF_OUTPUTS, adapt_configured
from .hugging_face.weights_reader import HuggingFaceConfig, configured_transformer, hugging_face, load_params
from .lora import LoRA, lora_config
from .mlp import MLPConfig, mlp
from .moe import MoEConfig, moe
from .transformer import TransformerConfig, transformer

MODELS: dict[str, tuple[type, Any]] = {
    "transformer": (TransformerConfig, transformer),
    "moe": (MoEConfig, moe),
    "mlp": (MLPConfig, mlp),
    "hugging_face": (HuggingFaceConfig, hugging_face),
}
"""Name -> options dataclass and the function from it to the model."""
MODULE = "a module of Flax, Equinox or Keras."


def load_model(
    spec: Mapping[str, Any],
    *,
    search_path: Sequence[str | Path] = (),
    example: Callable[[], Mapping[str, Any]] | None = None,
    **facts: int | None,
) -> Model | BlockModel:
    """Builds the model of a config's `model:` section.

    Args:
        spec: `name`, one of `MODELS` or the user's own `module:function`, and options; `check` and `lora` are not
            options of the model. The user's function gets the options as keyword arguments and returns a `Model`, a
            `BlockModel`, a pair (init, loss), or an object with `init` and `loss`; the name may also refer to such an
            object. Or it returns a module of Flax, Equinox or Keras: then `loss`, `metrics` and `inputs` are those of
            `adapt`. `lora`, the options of `LoRAConfig`, adds matrices that train in place of the model's own.
        search_path: Directories to search first for the user's module, and for a directory in the options.
        example: Returns a batch of at least one row, the example inputs of modules of other libraries.
        **facts: Sizes of the data: `vocabulary`, the number of token ids; `length`, the positions in a row; `features`,
            the values in the inputs of an example; `classes`. Each is the value of the option of that name if that is
            0 or missing.

    Raises:
        UserError: The model, module or function is unknown; options are unknown or invalid; sizes are too small for the
            data; or the function returned something else.
    """
    adapters, base = lora_config(spec), _base_model(spec, facts, search_path, example)
    return base if adapters is None else LoRA(base, adapters).model


def _base_model(
    spec: Mapping[str, Any], facts: Mapping[str, Any], search_path: Sequence[str | Path], example: Any = None
) -> Model | BlockModel:
    """Returns the model of a section without its low-rank adapters."""
    name, options = spec.get("name", "transformer"), _options(spec, search_path)
    known_facts = {fact: value for fact, value in facts.items() if value}
    if isinstance(name, str) and ":" in name:
        return _user_model(name, options, known_facts, search_path, example)
    if name not in MODELS:
        known = [*MODELS, "your own as module:function"]
        raise UserError(f"model.name={name!r} is not a model.{did_you_mean(name, known, otherwise='Choose from')}")
    return _reference_model(name, options, known_facts)


def _options(spec: Mapping[str, Any], search_path: Sequence[str | Path]) -> dict[str, Any]:
    """Returns the options of the model itself; `folder` is searched below some directories."""
    options = {option: value for option, value in spec.items() if option not in ("name", "check", "lora")}
    if options.get("folder") and not is_url(options["folder"]):
        places = [Path(place) / options["folder"] for place in search_path]
        options["folder"] = str(next((place for place in places if place.is_dir()), options["folder"]))
    return options


def initial_params(
    spec: Mapping[str, Any], model: Model | BlockModel, search_path: Sequence[str | Path] = (), *, seed: int = 0
) -> Params | None:
    """Returns the initial parameters of a config's model if they come from files.

    Args:
        spec: The `model:` section.
        model: The model of that section.
        search_path: Directories to search for the files.
        seed: The run's seed, for adapters.

    Returns:
        Arrays that are read from the files on demand, for `step.init(seed, params)`; None if the model draws its own.

    Raises:
        UserError: The files do not match the model.
    """
    if spec.get("name") != "hugging_face" or not isinstance(model, BlockModel):
        return None
    config, adapters = HuggingFaceConfig(**_options(spec, search_path)), lora_config(spec)
    if not config.weights:
        return None
    params = load_params(Path(config.folder), configured_transformer(config))
    if adapters is None:
        return params
    return LoRA(hugging_face(config), adapters).start(params, make_key(seed))


def without_adapters(
    spec: Mapping[str, Any], params: Params, facts: Mapping[str, int], search_path: Sequence[str | Path] = ()
) -> Params:
    """Returns parameters of a config's model with its low-rank adapters, if any, merged.

    Args:
        spec: The `model:` section.
        params: Parameters of its model.
        facts: The sizes from the data, as arguments of `load_model`.
        search_path: See `load_model`.
    """
    adapters = lora_config(spec)
    if adapters is None:
        return params
    return LoRA(_base_model(spec, facts, search_path), adapters).merge(params)


def transformer_of(
    spec: Mapping[str, Any], facts: Mapping[str, int], search_path: Sequence[str | Path] = ()
) -> tuple[TransformerConfig, str]:
    """Returns the transformer of a config, and the directory of its weights, "" for none.

    Args:
        spec: The `model:` section.
        facts: The sizes from the data, as arguments of `load_model`.
        search_path: See `load_model`.

    Raises:
        UserError: The config has another model.
    """
    name, options = spec.get("name", "transformer"), _options(spec, search_path)
    if name == "hugging_face":
        config = HuggingFaceConfig(**{**options, "length": facts.get("length", 0)})
        return configured_transformer(config), config.folder
    if name != "transformer":
        raise UserError(f"model.name={name!r} is not of a Hugging Face family; use a transformer.")
    sizes = {fact: options.get(fact) or facts.get(fact, 0) for fact in ("vocabulary", "length")}
    return TransformerConfig(**{**options, **sizes}), ""


def _reference_model(name: str, options: dict[str, Any], facts: dict[str, int]) -> Model | BlockModel:
    config_class, build = MODELS[name]
    known = [field.name for field in fields(config_class)]
    problems = unknown_options([option for option in options if option not in known], known, "model")
    too_small = [fact for fact in ("vocabulary", "classes") if 0 < options.get(fact, 0) < facts.get(fact, 0)]
    problems += [
        f"model.{fact}={options[fact]} is less than the data's {facts[fact]}. Leave it out, or raise it."
        for fact in too_small
    ]
    raise_problems(problems)
    from_data = {fact: value for fact, value in facts.items() if fact in known and not options.get(fact)}
    return build(config_class(**(options | from_data)))


def _user_model(
    name: str,
    options: dict[str, Any],
    facts: dict[str, int],
    search_path: Sequence[str | Path],
    example: Callable[[], Mapping[str, Any]] | None,
) -> Model | BlockModel:
    given = f"model.name={name!r}"
    named = import_named(name, "model.name", search_path)
    of_outputs = _of_outputs(named, options)
    is_maker = bool(of_outputs) or makes_modules(named, options)
    result = _made(named, options, facts, given, is_maker=is_maker)
    if library_of(result, makers=is_maker) is not None:
        return adapt_configured(result, name, of_outputs, search_path, example)
    if of_outputs:
        raise UserError(
            f"model.{next(iter(of_outputs))} is only for a module of Flax, Equinox or Keras, "
            f"and {given} returned a {type(result).__name__}. Leave it out."
        )
    model = as_model(result, name)
    if model is None:
        raise UserError(f"{given} returned a {type(result).__name__}. It must return {EXPECTED} {MODULE}")
    return model


def _of_outputs(named: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options about a module's outputs out of the options, if the name refers to a module."""
    is_module = library_of_class(named) is not None or "loss" in options
    if not is_module or takes_option(named, "loss"):
        return {}
    return {option: options.pop(option) for option in OF_OUTPUTS if option in options}


def _made(named: Any, options: dict[str, Any], facts: dict[str, int], given: str, *, is_maker: bool) -> Any:
    """Returns the model or module that `model.name` refers to, or the result of that function or class."""
    is_model = not isinstance(named, type) and as_model(named) is not None
    if is_model or library_of(named, makers=False) is not None:
        if options:
            raise UserError(
                f"{given} is a model, not a function: it does not take options such as {next(iter(options))}."
            )
        return named
    if not callable(named):
        raise UserError(
            f"{given} is a {type(named).__name__}: neither a function nor a model. It must return {EXPECTED} {MODULE}"
        )
    if is_maker:
        return made_with(named, options, facts, what=given, beside=OF_OUTPUTS)
    return with_options(named, options, facts, "model", given, beside=OF_OUTPUTS)()
