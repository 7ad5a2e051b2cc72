# SPDX-License-Identifier: Apache-2.0
"""What lies in a checkpoint directory, Hugging Face's or ours, and what is missing from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conversion.safetensors_file import StoredTensor, read_header
from mmjax.errors import CheckpointError
from mmjax.models.family import Family
from mmjax.models.registry import family_for

Part = Literal["weights", "tokenizer", "processor"]
ALL_PARTS: tuple[Part, ...] = ("weights", "tokenizer", "processor")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "mmjax.json"
PARAMS_DIR = "params"
FORMAT_VERSION = 1

TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
PROCESSOR_FILES = (("preprocessor_config.json",), ("processor_config.json",))

# Names of the output head in all layouts.
HEADS = frozenset(f"{prefix}lm_head.weight" for prefix in ("", "language_model.", "model.language_model."))

# Files that go with the weights wherever they go; patterns of the top level of the directory.
COMPANION_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*processor*.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "LICENSE*",
)


@dataclass(frozen=True)
class Manifest:
    """What mmjax.json says of a converted checkpoint."""

    format_version: int
    family: str
    dtype: str
    mmjax_version: str


@dataclass(frozen=True)
class Checkpoint:
    """A directory that has been looked at.

    Attributes:
      config: config.json as it stands, but for `tie_word_embeddings` where a stored head answers what it leaves open.
      manifest: None for a Hugging Face directory.
      weight_files: its safetensors files, in order; empty for a converted one.
    """

    path: Path
    config: dict[str, Any]
    manifest: Manifest | None
    weight_files: tuple[Path, ...]

    def family(self) -> Family:
        """The family that config.json names. Raises CheckpointError, with the known ones, if it is unknown."""
        return family_for(str(self.config.get("model_type")))

    def tensors(self) -> list[StoredTensor]:
        """Every stored tensor of a Hugging Face directory, from the headers alone."""
        return [tensor for file in self.weight_files for tensor in read_header(file).values()]

    def companions(self) -> list[Path]:
        """The files beside the weights: config, tokenizer, processors, chat template, licence."""
        found = {file for pattern in COMPANION_PATTERNS for file in self.path.glob(pattern) if file.is_file()}
        return sorted(found)


def describe(path: str | Path, parts: Collection[Part] = ALL_PARTS) -> Checkpoint:
    """Looks at a checkpoint directory and checks that the wanted parts are there.

    Raises:
      CheckpointError: everything that is missing, in one message; weights in another format, with the way out; a
        quantised checkpoint; a converted one of a format this version can't read.
    """
    path = Path(path)
    if not path.is_dir():
        kind = "is a file, not a checkpoint directory"
        if not path.exists():
            kind = "does not exist; mmjax loads local directories (`hf download NAME --local-dir DIR` fetches one)"
        raise CheckpointError(f"{path} {kind}")
    missing: list[str] = []
    config = _read_json(path / "config.json") if (path / "config.json").is_file() else None
    if config is None:
        missing.append("config.json")
    manifest = _read_manifest(path)
    weight_files: tuple[Path, ...] = ()
    if "weights" in parts:
        weight_files, absent = _find_weights(path, manifest)
        missing += absent
    if "tokenizer" in parts:
        missing += _absent(path, "tokenizer", TOKENIZER_FILES)
    if "processor" in parts and _has_processor_files(config):
        missing += _absent(path, "processor", PROCESSOR_FILES)
    if config is None or missing:
        lines = "".join(f"\n  {line}" for line in missing)
        raise CheckpointError(f"{path} is not a complete checkpoint; missing:{lines}")
    if "weights" in parts and (quantization := config.get("quantization_config")):
        method = quantization.get("quant_method", "unknown method")
        raise CheckpointError(f"{path} holds quantised weights ({method}); mmjax loads float32, float16 and bfloat16")
    return Checkpoint(path, _settle_tie(config, path, weight_files), manifest, weight_files)


def _has_processor_files(config: dict[str, Any] | None) -> bool:
    """Whether checkpoints of this family keep settings of their processor beside config.json."""
    try:
        return family_for(str((config or {}).get("model_type"))).processor_files
    except CheckpointError:  # of no known family: whoever needs that says so
        return True


def _settle_tie(config: dict[str, Any], path: Path, weight_files: tuple[Path, ...]) -> dict[str, Any]:
    """`config`, saying that the output head is not tied where it says nothing and the weights hold a head.

    Model classes differ in what silence means, and published checkpoints of some say nothing against their class.
    """
    if "tie_word_embeddings" in config or not weight_files:
        return config
    single = path / SINGLE_FILE
    names = read_header(single) if single.is_file() else _read_json(path / INDEX_FILE).get("weight_map", {})
    return config if HEADS.isdisjoint(names) else {**config, "tie_word_embeddings": False}


def _find_weights(path: Path, manifest: Manifest | None) -> tuple[tuple[Path, ...], list[str]]:
    """Weight files, and lines that say what is missing. A single file wins over an index, as in transformers."""
    if manifest is not None:
        there = (path / PARAMS_DIR).is_dir()
        return (), [] if there else [f"{PARAMS_DIR}/ (weights of a converted checkpoint)"]
    if (path / SINGLE_FILE).is_file():
        return (path / SINGLE_FILE,), []
    if (path / INDEX_FILE).is_file():
        shards = sorted(set(_read_json(path / INDEX_FILE).get("weight_map", {}).values()))
        absent = [f"{name} (a shard that {INDEX_FILE} lists)" for name in shards if not (path / name).is_file()]
        return tuple(path / name for name in shards), absent
    return (), [f"{SINGLE_FILE} or {INDEX_FILE} (weights)" + _other_weights(path)]


def _other_weights(path: Path) -> str:
    """A hint when the directory holds weights of another kind."""
    if (path / PARAMS_DIR).is_dir():
        return f"; {PARAMS_DIR}/ without {MANIFEST_FILE} is an unfinished conversion: delete it and convert again"
    for suffix in (".bin", ".pt", ".pth", ".gguf"):
        if found := sorted(path.glob(f"*{suffix}")):
            return (
                f"; found {found[0].name}, which mmjax does not read: load the directory with transformers and write"
                " it again with model.save_pretrained(OUT), which makes safetensors files"
            )
    if found := sorted(path.glob("*.safetensors")):
        return f"; found {found[0].name}, which is not the name of a full model's weights (an adapter?)"
    return ""


def _absent(path: Path, part: str, choices: Iterable[tuple[str, ...]]) -> list[str]:
    if any(all((path / name).is_file() for name in names) for names in choices):
        return []
    return [" or ".join(" + ".join(names) for names in choices) + f" ({part})"]


def _read_manifest(path: Path) -> Manifest | None:
    file = path / MANIFEST_FILE
    if not file.is_file():
        return None
    content = _read_json(file)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} was written in format {version} by mmjax {content.get('mmjax_version')}; this version reads format"
            f" {FORMAT_VERSION}: convert the original checkpoint again"
        )
    try:
        return Manifest(**content)
    except TypeError as error:
        raise CheckpointError(f"{file} is not a manifest of mmjax: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes an object the way Hugging Face's files look."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
