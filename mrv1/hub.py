"""Models of the Hugging Face Hub: the form of an id, the download, and errors that help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mrv1.errors import ConfigError

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files of a snapshot that mrv1 reads: no second copy of the weights in another format."""

_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[^\s@]+))?", re.ASCII)


def is_hub_id(model: str) -> bool:
    """Return whether ``model`` has the form ``org/name`` or ``org/name@revision``."""
    return _ID.fullmatch(model) is not None


def snapshot_dir(model: str, *, progress: bool = True) -> Path:
    """Return the directory of a Hub model in the local cache; download what the cache lacks.

    Without a network, or with ``HF_HUB_OFFLINE=1``, a model in the cache is used as it is.
    ``model`` is ``org/name`` or ``org/name@revision``, a branch, a tag or a commit. ``progress``
    is shown on stderr if that is a terminal. ConfigError: the id has another form, there is no
    such model or revision, the model is gated or private, or it is not in the cache and cannot be
    downloaded.
    """
    from huggingface_hub import constants, errors, snapshot_download  # takes 0.2 s to import
    from huggingface_hub.utils import tqdm

    match = _ID.fullmatch(model)
    if match is None:
        raise ConfigError(f"model: expected org/name or org/name@revision, got {model!r}")
    repo, revision = match["id"], match["revision"]
    command = f"`hf download {repo}{f' --revision {revision}' if revision else ''}`"
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(FILES),
                tqdm_class=tqdm if progress else _hidden(tqdm),
            )
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"model: expected access to the gated model {model!r}, got none; accept its terms at "
            f"{constants.ENDPOINT}/{repo}, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"model: expected a directory or the id of a public model, got {model!r}, which is "
            "neither; a private model needs HF_TOKEN or `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"model: expected a branch, tag or commit of {repo!r} after the '@', got {revision!r}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            raise ConfigError(
                "model: expected a directory or, with HF_HUB_OFFLINE=1, a complete model in "
                f"{constants.HF_HUB_CACHE!r}, got {model!r}, which is neither; run {command} with "
                "a network, or unset HF_HUB_OFFLINE"
            ) from error
        raise ConfigError(
            f"model: expected a directory or a connection to {constants.ENDPOINT}, which "
            f"{model!r} needs, got {_first_line(error.__cause__ or error)}; run {command} where "
            "there is a network"
        ) from error
    except Exception as error:  # a full disk, a name the Hub forbids, HTTP errors of other types
        raise ConfigError(
            f"model: expected {model!r} to be downloaded, got {_first_line(error)}"
        ) from error


def _hidden(bar: type[Any]) -> type[Any]:
    """Return a class of progress bars that are not shown."""

    class Hidden(bar):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options | {"disable": True})

    return Hidden


def _first_line(error: BaseException) -> str:
    """Return the type and the first line of an exception's text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
