"""Models of the Hugging Face hub, through the hub's own client and its shared cache.

Only what a model folder needs is fetched: config, tokenizer and safetensors of the top folder.
Pickle files are never downloaded. Offline, a model that lies complete in the cache is used.
"""

from __future__ import annotations

import re
from pathlib import Path

from qtool.errors import ModelError
from qtool.formats.reader import CONFIG_NAME, INDEX_NAME
from qtool.formats.writer import SIDE_FILE_PATTERNS

WANTED = ("*.safetensors", INDEX_NAME, CONFIG_NAME, *SIDE_FILE_PATTERNS)
# Subfolders hold other formats of the same weights, and so do Mistral's consolidated files.
UNWANTED = ("*/*", "consolidated*")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``org/name`` that the hub gives its models."""
    part = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
    return re.fullmatch(f"{part}/{part}", name) is not None


def download(model: str) -> Path:
    """The snapshot folder of a hub id, fetched where the cache lacks it.

    Raises:
        ModelError: no such model, no access, no connection and no copy, or no safetensors.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            model, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
        )
    except GatedRepoError:
        raise ModelError(
            f"{model} is gated: accept its terms on its page on the hub, log in with `hf auth "
            "login`, and run again"
        ) from None
    except LocalEntryNotFoundError as error:
        raise _not_reached(model, error) from None
    except Exception as error:  # the client raises its HTTP library's and the system's errors too
        raise ModelError(
            f"{model!r} is no local folder, and the hub does not give it ({_first_line(error)}); "
            "check the name, and log in with `hf auth login` if the model is private"
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ModelError(
            f"{model} has no *.safetensors file on the hub; choose a model with safetensors "
            "weights, or download its GGUF file and give its path"
        )
    return Path(folder)


def _not_reached(model: str, error: Exception) -> ModelError:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else f"no connection: {_first_line(error)}"
    return ModelError(
        f"{model!r} is no local folder, the hub cannot be asked ({why}), and its cache holds no "
        "complete copy; connect and run again, or copy the model here and give its folder"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
