"""What is read of a checkpoint: a Hugging Face directory or a GGUF file. No code of it runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from os.path import isfile  # False for a name that no file system accepts; Path.is_file raises
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mrv1.config import QuantizationName, checkpoint_dir
from mrv1.errors import ConfigError
from mrv1.models.files import raise_problems, read_json, refusal
from mrv1.models.gguf_file import SUFFIX, GGUFFile, open_gguf
from mrv1.models.hf_config import WEIGHT_DTYPES, support_problems
from mrv1.models.places import stored_dtype
from mrv1.models.quantization import GGUFBlocks, Quantization, read_quantization
from mrv1.models.tokenizer import TOKENIZER_FILES, load_from_files, missing_packages
from mrv1.models.vision import text_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SINGLE_FILE = "model.safetensors"
"""The whole model in one file; looked for first, as transformers does."""
INDEX_FILE = "model.safetensors.index.json"
"""The index that names the shard of each tensor."""
GENERATION_CONFIG = "generation_config.json"
"""The file with sampling defaults and end-of-sequence tokens."""
KEPT_ON: tuple[str, ...] = ()
"""Types of devices where blocks of a GGUF file are kept unless asked otherwise. On a CPU each
product would widen them again, on a GPU those of prompts: more than 64 tokens take longer so."""
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint, known from a file's header."""

    file: Path
    """The safetensors or GGUF file that contains the tensor."""
    name: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it, for example ``BF16``; of GGUF ``F32``, or ``U8`` of blocks."""
    index: tuple[int | slice, ...] = ()
    """Where the tensor is in the file's; () = it is all of that."""
    is_turned: bool = False
    """Whether the last two dimensions of the file's tensor are in the other order."""


@dataclass(slots=True, kw_only=True)
class Scan:
    """The headers of a checkpoint's files."""

    named: set[str] = field(default_factory=set)
    """Tensors that the checkpoint claims to hold; none if the claim itself is unreadable."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """The tensors that can be read, by name."""
    problems: list[str] = field(default_factory=list)
    """Everything wrong with the index and the files."""

    def rename(self, usual: Callable[[str], str | None]) -> None:
        """Give tensors their ``usual`` names; None = a tensor is left out."""
        names = {own: name for own in self.named if (name := usual(own)) is not None}
        counts = Counter(names.values())
        self.problems += [f"{name}: stored twice" for name, n in sorted(counts.items()) if n > 1]
        self.named = {*counts}
        self.tensors = {names[own]: t for own, t in self.tensors.items() if own in names}


class Checkpoint:
    """A directory with ``config.json`` and safetensors; each call reads what it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = f"checkpoint {str(path)!r}"
        """Beginning of messages."""

    @staticmethod
    def open(model: str | Path, *, progress: bool = True) -> Checkpoint:
        """Return a model's checkpoint; arguments and errors as in ``checkpoint_dir``."""
        return Checkpoint.at(checkpoint_dir(model, progress=progress))

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """Return the checkpoint at a path, which is a GGUF file if its name says so."""
        is_gguf = path.suffix == SUFFIX and not path.is_dir()
        return GGUFCheckpoint(path) if is_gguf else Checkpoint(path)

    def raw_config(self) -> dict[str, Any]:
        """Return ``config.json``, of a GGUF file {}; ConfigError: the file is not valid."""
        return read_json(self.path / "config.json")

    def hf_config(self) -> PretrainedConfig:
        """Return the family's transformers configuration; one ConfigError lists all problems.

        If config.json names no dtype, as gpt-oss's, it is the stored embedding's.
        """
        from transformers import AutoConfig  # takes seconds to import: only loading pays for it

        raise_problems(self.where, support_problems(self.raw_config()))
        try:
            config = AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # KeyError, ValueError and transformers' validation errors
            reason = refusal(error)
            raise ConfigError(f"{self.where}: config.json is not valid: {reason}") from error
        if config.dtype is None and config.get_text_config().dtype is None:
            config.dtype = self._embedding_dtype()
        return config

    def _embedding_dtype(self) -> torch.dtype | None:
        """Return the dtype of the stored embedding, or of the head tied to it; None = unknown."""
        tensors = self.scan(has_vision=True).tensors
        stored = next((tensors[name] for name in _VOCABULARY if name in tensors), None)
        dtype = None if stored is None else stored_dtype(stored.dtype)
        return dtype if dtype in WEIGHT_DTYPES else None

    def quantization(self) -> Quantization | None:
        """Return how weights are quantized; None = not; ConfigError: a way that is not read."""
        try:
            raw = self.raw_config()
            if read_quantization(raw, {}, self.path) is None:
                return None
            return read_quantization(raw, self._scan().tensors, self.path)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error

    def quantization_on(
        self, asked: QuantizationName | None, device: torch.device | str
    ) -> QuantizationName | None:
        """Return which quantization a model has on ``device``, if ``asked`` is asked for."""
        return asked

    def generation_config(self, source: str | Path | None = "auto") -> tuple[Path, dict[str, Any]]:
        """Return a ``generation_config.json`` and its content, which is empty without a file.

        ``source`` is ``EngineConfig.generation_config``: the checkpoint's own file, or a
        directory. ConfigError: that directory has no such file, or the file is not valid.
        """
        is_own = source in ("auto", "vllm", None)
        try:
            folder = self.path if is_own else Path(str(source)).expanduser()
            file = folder / GENERATION_CONFIG
            if file.is_file():
                return file, read_json(file)
        except (OSError, RuntimeError) as error:  # RuntimeError: no such user after the ~
            raise ConfigError(
                f"generation_config: expected a readable directory, got {str(source)!r}: {error}"
            ) from error
        if not is_own:
            raise ConfigError(
                f"generation_config: expected 'auto', 'vllm', None or a directory with a "
                f"{GENERATION_CONFIG}, got {str(source)!r}, which has none"
            )
        return file, {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer; without one a checkpoint serves token ids only."""
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return transformers' tokenizer; ConfigError: damaged, contradictory, or needs code."""
        try:
            return self._tokenizer()
        except Exception as error:  # the tokenizers package raises its own types
            raise ConfigError(
                f"tokenizer: cannot load the one in {str(self.path)!r}: {refusal(error)}"
                f"{missing_packages(self.path)}"
            ) from error

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_from_files(self.path)

    def scan(self, *, has_vision: bool = False, quantization: Quantization | None = None) -> Scan:
        """Return all tensors and problems; with ``has_vision``, the text model's tensors alone.

        ``quantization`` says whether blocks of a GGUF file are kept.
        """
        scan = self._scan(quantization)
        if has_vision:
            scan.rename(text_name)
        return scan

    def read(
        self,
        tensors: Mapping[str, StoredTensor],
        parts: Mapping[str, tuple[slice, ...]] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of tensors of ``scan``, on the CPU; of ``parts``, the slice."""
        names_of_file: dict[Path, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            names_of_file[tensor.file].append(name)
        for file, names in names_of_file.items():
            with self._open(file) as opened:
                for name in names:
                    tensor = tensors[name]
                    if tensor.index or tensor.is_turned:
                        piece = _piece(opened.get_slice(tensor.name), tensor)
                        yield name, piece[parts[name]] if parts and name in parts else piece
                    elif parts and name in parts:
                        yield name, opened.get_slice(tensor.name)[parts[name]]
                    else:
                        yield name, opened.get_tensor(tensor.name)

    def tensors(self, prefixes: tuple[str, ...] = ("",)) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors with a prefix, by name, on the CPU; one ConfigError lists bad files."""
        scan = self.scan()
        raise_problems(self.where, scan.problems)
        return self.read({n: t for n, t in scan.tensors.items() if n.startswith(prefixes)})

    def kv_scales(
        self, num_layers: int, num_kv_heads: int, *, has_vision: bool = False
    ) -> torch.Tensor:
        """Return the static scales of an fp8 cache, as calibration tools store them.

        They are ``[layers, 2, kv_heads]`` float32 on the CPU, of keys, then of values:
        dequantisation multipliers, ``x ~ q * scale``, of a whole layer or of a KV head. One
        ConfigError lists all that are missing, misshaped or not positive numbers.
        """
        scan = self.scan(has_vision=has_vision)
        problems = list(scan.problems)
        scales = torch.ones(num_layers, 2, num_kv_heads)
        places, missing = {}, []
        for layer, (index, part) in product(range(num_layers), enumerate("kv")):
            names = scale_names(layer, part)
            if found := [name for name in names if name in scan.tensors]:
                places[found[0]] = scales[layer, index]
            else:
                missing.append(names)
        for name, tensor in self.read({name: scan.tensors[name] for name in places}):
            scale = tensor.float().flatten()
            if tensor.numel() not in (1, num_kv_heads):
                problems.append(
                    f"{name}: expected one value or {num_kv_heads} (KV heads), "
                    f"got shape {list(tensor.shape)}"
                )
            elif not bool((scale.isfinite() & (scale > 0)).all()):
                problems.append(f"{name}: expected finite values > 0, got {scale}")
            else:
                places[name].copy_(scale)
        if missing:
            names, more = missing[0], f" (and {len(missing) - 1} more)" if missing[1:] else ""
            problems.append(
                f"{names[0]}: missing{more}, under this name or as {' or '.join(names[1:])}; "
                "kv_scale='head' takes its scales from the checkpoint: choose kv_scale='token', "
                "which needs none"
            )
        raise_problems(f"kv_scale: {self.where}", problems)
        return scales

    def _scan(self, quantization: Quantization | None = None) -> Scan:
        """Return the tensors under their stored names, and every problem."""
        single, index = self.path / SINGLE_FILE, self.path / INDEX_FILE
        try:
            if single.is_file():
                tensors = self._header(single)
                return Scan(named=set(tensors), tensors=tensors)
            if index.is_file():
                return self._scan_shards(_weight_map(index))
        except ConfigError as error:
            return Scan(problems=[str(error)])
        others = sorted(p.name for p in self.path.glob("*") if p.suffix in _WEIGHT_SUFFIXES)
        found = ", ".join(others) or "none"
        return Scan(problems=[f"weights: expected {SINGLE_FILE} or {INDEX_FILE}, got {found}"])

    def _scan_shards(self, weight_map: Mapping[str, str]) -> Scan:
        """Return the tensors that an index places in shards, and every difference to them."""
        scan = Scan(named=set(weight_map))
        names_of_shard: dict[str, set[str]] = defaultdict(set)
        for name, shard in weight_map.items():
            names_of_shard[shard].add(name)
        for shard, names in sorted(names_of_shard.items()):
            if not isfile(self.path / shard):
                shown = shard if len(shard) <= 80 else f"{shard[:80]}..."
                problem = f"{shown}: named in {INDEX_FILE}, but there is no such file"
                scan.problems.append(problem)
                continue
            try:
                held = self._header(self.path / shard)
            except ConfigError as error:
                scan.problems.append(str(error))
                continue
            scan.tensors |= {name: held[name] for name in names & held.keys()}
            scan.problems += [
                f"{name}: {INDEX_FILE} places it in {shard}, which does not hold it"
                for name in sorted(names - held.keys())
            ]
            scan.problems += [
                f"{name}: held by {shard}, but {INDEX_FILE} does not place it there"
                for name in sorted(held.keys() - names)
            ]
        return scan

    def _header(self, file: Path) -> dict[str, StoredTensor]:
        """Return the tensors of a safetensors file; errors as ``_open``."""
        with self._open(file) as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(
                    file=file, name=name, shape=tuple(view.get_shape()), dtype=view.get_dtype()
                )
                for name, view in views.items()
            }

    @contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        """Open a file, memory-mapped; ConfigError: missing, truncated or of another format."""
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file.name}: not a readable safetensors file: {error}") from error


def safetensors_of(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, on the CPU; ConfigError: it is none."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file.name}: not a readable safetensors file: {error}") from error


def _piece(stored: Any, tensor: StoredTensor) -> torch.Tensor:  # noqa: ANN401 - safetensors'
    """Return the part of a file's tensor that ``tensor`` is."""
    if tensor.is_turned:
        expert, rows = tensor.index[:1], tensor.index[1:]
        turned: torch.Tensor = stored[(*expert, slice(None), *rows)]
        return turned.T
    piece: torch.Tensor = stored[tensor.index]
    return piece


def scale_names(layer: int, part: str) -> tuple[str, ...]:
    """Return names of the scale of "k" or "v": compressed-tensors', vLLM's and ModelOpt's."""
    attention = f"model.layers.{layer}.self_attn"
    return (
        f"{attention}.{part}_scale",
        f"{attention}.attn.{part}_scale",
        f"{attention}.{part}_proj.{part}_scale",
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Return the name of each tensor's shard; ConfigError: the index is not valid."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    ):
        raise ConfigError(
            f"{index.name}: expected weight_map to name a file of the directory for each tensor"
        )
    return weight_map


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, or all files of a model that llama.cpp has split."""

    @property
    def _file(self) -> GGUFFile:
        return open_gguf(self.path)

    def raw_config(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def hf_config(self) -> PretrainedConfig:
        """Return the configuration that the metadata describe; errors as in ``Checkpoint``."""
        try:
            return self._file.config()
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error

    def quantization(self) -> GGUFBlocks | None:
        """Return the types of blocks that can be kept; None = the file has none."""
        try:
            return self._file.quantization()
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error

    def quantization_on(
        self, asked: QuantizationName | None, device: torch.device | str
    ) -> QuantizationName | None:
        """Return ``asked``; if that is None, blocks are kept on devices of ``KEPT_ON``."""
        is_open = asked is None and torch.device(device).type in KEPT_ON
        return "gguf" if is_open and self.quantization() is not None else asked

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a vocabulary."""
        return self._file.has_tokenizer

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._file.vocabulary.tokenizer()

    def _scan(self, quantization: Quantization | None = None) -> Scan:
        try:
            file = self._file
            file.check_quantizations()
        except ConfigError as error:
            return Scan(problems=[str(error)])
        is_kept = isinstance(quantization, GGUFBlocks)
        tensors = {
            name: StoredTensor(file=self.path, name=name, shape=shape, dtype=dtype)
            for name, (shape, dtype) in file.headers(keeps_blocks=is_kept).items()
        }
        return Scan(named=set(tensors), tensors=tensors)

    @contextmanager
    def _open(self, file: Path) -> Iterator[GGUFFile]:
        yield open_gguf(file)
