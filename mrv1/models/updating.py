"""New values for the weights of a model on the device, by the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from mrv1.errors import ConfigError
from mrv1.models.config import ModelConfig
from mrv1.models.fused import OtherNames
from mrv1.models.hf_config import WEIGHT_DTYPES
from mrv1.models.loading import NON_WEIGHT_SUFFIXES, biases_of_none
from mrv1.models.places import Place
from mrv1.models.quantization import zero_problem
from mrv1.models.vision import text_name
from mrv1.models.weights import EMBED, HEAD

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Tensors under the names of a Hugging Face checkpoint: a dict, or pairs."""


def checked_update(
    places: Mapping[str, Place], named_tensors: NamedTensors, *, config: ModelConfig, partial: bool
) -> dict[str, torch.Tensor]:
    """Return the new tensors by name, without those that are no weights; nothing is written.

    Scales come before codes. ``places`` are the ``checkpoint_places`` of the model, whose
    configuration, that of the whole model, is ``config``; with ``partial``, some may be missing,
    but none of a quantized module without the others. A tied head is the embedding: given without
    it, it takes its place. Experts may have their names in a transformers model in memory.

    Raises:
        ConfigError: a tensor is missing, unknown, given twice or of another shape or type.
    """
    given = _by_name(named_tensors, has_vision=config.has_vision)
    given = {name: tensor for name, tensor in given.items() if not config.is_of_drafter(name)}
    if config.other_names is not None:
        given = _split_fused(given, config.other_names)
    if config.quantization is not None:
        given = {config.quantization.renamed(name): tensor for name, tensor in given.items()}
    is_tied = config.tie_word_embeddings
    tied = given.pop(HEAD, None) if is_tied and HEAD not in places else None
    if tied is not None and EMBED not in given:  # under one of the two names, as in a checkpoint
        given[EMBED] = tied
    tensors = {
        name: tensor
        for name, tensor in given.items()
        if name in places or not name.endswith(NON_WEIGHT_SUFFIXES)
    }
    if config.quantization is not None and config.quantization.has_zero_biases:
        biases = biases_of_none(places)
        tensors = {n: t for n, t in tensors.items() if n not in biases or not _is_zero(t)}
    problems = list(_problems(tensors, places, partial=partial))
    if tied is not None and not problems:
        problems += _tied_problems(tied, tensors[EMBED], places[EMBED])
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if problems[1:] else ""
        raise ConfigError(f"update_weights: {problems[0]}{more}; no weight was changed")
    ordered = sorted(tensors.items(), key=lambda each: not places[each[0]].is_small)
    return {
        name: tensor[None] if places[name].is_one or not tensor.dim() else tensor
        for name, tensor in ordered
    }


def _is_zero(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return False
    return zero_problem(tensor) is None


def _by_name(named_tensors: object, *, has_vision: bool) -> dict[str, torch.Tensor]:
    if not isinstance(named_tensors, Iterable):
        raise ConfigError(
            "named_tensors: expected a dict or an iterable of (name, tensor) pairs, got "
            f"{type(named_tensors).__name__}"
        )
    if isinstance(named_tensors, Mapping):
        named_tensors = named_tensors.items()
    tensors: dict[str, torch.Tensor] = {}
    for item in named_tensors:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            got = type(item).__name__
            if isinstance(item, tuple):
                got = f"a tuple of ({', '.join(type(part).__name__ for part in item)})"
            raise ConfigError(
                f"named_tensors: expected (name, tensor) pairs, got {got} at index {len(tensors)}"
            )
        stored_name, tensor = item
        name = text_name(stored_name) if has_vision else stored_name
        if name in tensors:
            raise ConfigError(f"named_tensors: expected each name once, got {stored_name!r} twice")
        if name is not None:
            tensors[name] = tensor
    if not tensors:
        raise ConfigError("named_tensors: expected at least one tensor, got none")
    return tensors


def _split_fused(given: Mapping[str, torch.Tensor], names: OtherNames) -> dict[str, torch.Tensor]:
    """Return tensors under their usual names: views of fused ones."""
    tensors: dict[str, torch.Tensor] = {}
    for stored_name, given_tensor in given.items():
        tensor, fused, pieces = (
            given_tensor,
            names.fused.get(stored_name),
            names.pieces(stored_name),
        )
        is_tensor = isinstance(tensor, torch.Tensor)
        if is_tensor and tensor.shape == names.turned.get(stored_name):
            tensor = tensor.mT
        if fused is not None and not (is_tensor and tensor.shape == fused.shape):
            got = list(tensor.shape) if is_tensor else type(tensor).__name__
            raise ConfigError(
                f"named_tensors: {stored_name}: expected a tensor of shape {list(fused.shape)}, "
                f"got {got}"
            )
        if again := pieces.keys() & tensors.keys():
            raise ConfigError(
                f"named_tensors: expected each name once, got {min(again)!r} again as "
                f"{stored_name!r}"
            )
        tensors |= {name: tensor[index] if index else tensor for name, index in pieces.items()}
    return tensors


def _problems(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place], *, partial: bool
) -> Iterator[str]:
    """Yield what is wrong with tensors that are to fill ``places``."""
    for name, tensor in tensors.items():
        if name not in places:
            yield f"{name}: expected the name of a tensor of the model, got an unknown one"
        else:
            yield from _problems_of(name, tensor, places[name])
    modules = {places[name].module for name in tensors if name in places}
    for name, place in places.items():
        if name in tensors:
            continue
        if not partial:
            yield f"{name}: expected a tensor for it, got none (partial=True allows this)"
        elif place.module is not None and place.module in modules:
            yield f"{name}: expected a tensor for it, as for others of {place.module}, got none"


def _problems_of(name: str, tensor: torch.Tensor, place: Place) -> Iterator[str]:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        yield f"{name}: expected a plain torch.Tensor, got {type(tensor).__name__}"
    elif tensor.dtype not in place.dtypes:
        dtypes = WEIGHT_DTYPES if place.module is None else tuple(place.dtypes)
        yield f"{name}: expected a dtype of {dtypes}, got {tensor.dtype}"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        kind = "one without data" if tensor.is_meta else str(tensor.layout)
        yield f"{name}: expected a dense tensor, got {kind}"
    elif not place.fits(tensor.shape):
        yield f"{name}: expected shape {list(place.shape)}, got {list(tensor.shape)}"
    elif (problem := place.problem_of(tensor)) is not None:
        yield f"{name}: {problem}"


def _tied_problems(head: torch.Tensor, embed: torch.Tensor, place: Place) -> Iterator[str]:
    """Yield a problem if a given head is not the embedding that it is tied to."""
    problems = list(_problems_of(HEAD, head, place))
    yield from problems
    if not problems and not torch.equal(head.to(embed.device, embed.dtype), embed):
        yield f"{HEAD}: expected {EMBED}, to which it is tied, got other values"
