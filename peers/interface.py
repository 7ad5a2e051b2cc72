# SPDX-License-Identifier: Apache-2.0
"""What a peer is to the benchmarks, and how one is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, UInt8

from mmjax.errors import ConfigError

Conversation = Sequence[Mapping[str, Any]]
Ids = Int32[np.ndarray, "B T"]
Picture = UInt8[np.ndarray, "height width 3"]


@dataclass(frozen=True)
class PeerModel:
    """What a peer loads.

    Attributes:
      folder: a checkpoint in Hugging Face's layout.
      random: it has no weights; the peer draws its own.
      dtype: "float32" or "bfloat16".
      device: "cuda" or "cpu".
    """

    folder: Path
    random: bool
    dtype: str
    device: str


class Peer(Protocol):
    """An engine beside ours. Every call returns when the device is done."""

    versions: Mapping[str, str]  # of the packages that do its work
    about: str  # how it was set up, for the note beside its figures

    def chat(self, conversations: Sequence[Conversation], new_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `new_tokens` tokens; pictures and templates included."""

    def close(self) -> None:
        """Gives the device's memory back."""


class ModelPeer(Peer, Protocol):
    """A peer whose parts run alone as well."""

    def tower(self, pictures: Sequence[Picture], *, resident: bool) -> Callable[[], None]:
        """A call that runs the tower over these; their pixels are on the device before it, or go there in it."""

    def generate(self, ids: Ids, new_tokens: int) -> tuple[Ids, list[float]]:
        """Greedy continuations [B, new_tokens], and the seconds between each token and the next."""


_NEEDS = {
    "transformers": ("peers.transformers_peer", "TransformersPeer", ("torch", "torchvision")),
    "vllm": ("peers.vllm_peer", "VllmPeer", ("vllm",)),
}


def load_peer(name: str) -> Callable[[PeerModel], Peer]:
    """The class of a peer. Raises ConfigError, saying what to install, where its packages are missing."""
    module, class_name, packages = _NEEDS[name]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"--peer {name} needs {' and '.join(missing)}, not installed here: pip install {' '.join(packages)}"
        )
    try:
        return getattr(import_module(module), class_name)
    except ImportError as error:
        raise ConfigError(f"--peer {name}: {' and '.join(packages)} can't be imported: {error}") from error


def split_pictures(conversation: Conversation) -> tuple[list[dict], list[Picture]]:
    """The messages with bare image parts, as chat templates take them, and the pictures in their order."""
    pictures: list[Picture] = []
    messages = []
    for message in conversation:
        parts = []
        for part in message["content"]:
            if part["type"] == "image":
                pictures.append(part["image"])
                parts.append({"type": "image"})
            else:
                parts.append(dict(part))
        messages.append({"role": message["role"], "content": parts})
    return messages, pictures
