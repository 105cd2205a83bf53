"""A sentence encoder of a local folder, on numpy and tokenizers without torch, and its vector index.

Only this module imports the two packages, which are the extra `semantic`.  Nothing is ever fetched.
The folder has the layout of sentence-transformers for a BERT, such as all-MiniLM-L6-v2: `config.json`,
`tokenizer.json`, `model.safetensors`.
"""

import contextlib
import functools
import hashlib
import json
import math
import mmap
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ...policies.errors import PolicyError
from ..database import Database

Floats = npt.NDArray[np.float32]
_MAX_TOKENS = 256  # MiniLM's training length; the beginning of a description says what a tool does
_BATCH = 16
_CACHE_FORMAT = 2001  # registries have 1001, runs count from 1
_CACHE_SCHEMA = "CREATE TABLE vectors (text BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID"
_FILES = ("config.json", "tokenizer.json", "model.safetensors")
_TYPES = {"F32": "<f4", "F16": "<f2"}


class Encoder:
    """A BERT whose last layer is averaged over the tokens: a text becomes a vector of length 1."""

    def __init__(self, folder: Path) -> None:
        """Raises PolicyError if the folder has no such model."""
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            hint = "name a folder with a sentence encoder, such as all-MiniLM-L6-v2"
            raise PolicyError(f"{folder} has no {', '.join(missing)}", hint)
        try:
            self._read(folder)
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise PolicyError(f"cannot read a BERT from {folder}: {error!r}") from error

    def _read(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._weights = _tensors(folder / "model.safetensors")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(
            min(_MAX_TOKENS, int(config.get("max_position_embeddings", _MAX_TOKENS)))
        )
        self._tokenizer.no_padding()
        self.size = int(self._weights["embeddings.word_embeddings.weight"].shape[1])
        self._folder = folder

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the files, which identifies the model in the cache."""
        parts = b"".join(_digest(self._folder / name) for name in _FILES)
        return hashlib.sha256(parts).hexdigest()

    def encode(self, texts: Sequence[str]) -> Floats:
        """Return one vector for each text."""
        vectors = np.zeros((len(texts), self.size), np.float32)
        tokens = [each.ids for each in self._tokenizer.encode_batch([*map(_sound, texts)])]
        order = sorted(range(len(texts)), key=lambda number: len(tokens[number]))
        for start in range(0, len(order), _BATCH):  # texts of similar length need little padding
            batch = order[start : start + _BATCH]
            vectors[batch] = self._encode([tokens[number] for number in batch])
        return vectors

    def _encode(self, tokens: list[list[int]]) -> Floats:
        length = max(1, *map(len, tokens))
        ids = np.zeros((len(tokens), length), np.int64)
        there = np.zeros((len(tokens), length), np.float32)
        for row, each in enumerate(tokens):
            ids[row, : len(each)] = each
            there[row, : len(each)] = 1
        states = self._embedded(ids)
        unseen: Floats = (1 - there)[:, None, None, :] * np.float32(-1e9)
        for layer in range(self._layers):
            states = self._layer(f"encoder.layer.{layer}", states, unseen)
        total = (states * there[:, :, None]).sum(1) / np.maximum(there.sum(1), 1)[:, None]
        norm = np.linalg.norm(total, axis=1, keepdims=True)
        return np.asarray(total / np.maximum(norm, 1e-12), np.float32)

    def _embedded(self, ids: npt.NDArray[np.int64]) -> Floats:
        part = "embeddings.{}_embeddings.weight".format
        words = self._weights[part("word")][ids]
        positions = self._weights[part("position")][: ids.shape[1]]
        kinds = self._weights[part("token_type")][0]
        return self._normed("embeddings.LayerNorm", words + positions + kinds)

    def _layer(self, name: str, states: Floats, unseen: Floats) -> Floats:
        attended = self._attended(f"{name}.attention.self", states, unseen)
        attended = self._linear(f"{name}.attention.output.dense", attended)
        states = self._normed(f"{name}.attention.output.LayerNorm", states + attended)
        inner = _gelu(self._linear(f"{name}.intermediate.dense", states))
        inner = self._linear(f"{name}.output.dense", inner)
        return self._normed(f"{name}.output.LayerNorm", states + inner)

    def _attended(self, name: str, states: Floats, unseen: Floats) -> Floats:
        rows, length, size = states.shape
        parts = [
            self._linear(f"{name}.{part}", states)
            .reshape(rows, length, self._heads, size // self._heads)
            .transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        ]
        query, key, value = parts
        scores = query @ key.transpose(0, 1, 3, 2) / np.float32(math.sqrt(size // self._heads))
        scores = scores + unseen
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ value
        return np.asarray(mixed.transpose(0, 2, 1, 3).reshape(rows, length, size), np.float32)

    def _linear(self, name: str, states: Floats) -> Floats:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return np.asarray(states @ weight.T + bias, np.float32)

    def _normed(self, name: str, states: Floats) -> Floats:
        centred = states - states.mean(-1, keepdims=True)
        spread = np.sqrt((centred * centred).mean(-1, keepdims=True) + self._epsilon)
        scaled = centred / spread * self._weights[f"{name}.weight"]
        return np.asarray(scaled + self._weights[f"{name}.bias"], np.float32)


class VectorIndex:
    """A `Meaning` for a SearchIndex: vectors of texts, compared one by one.

    With `cache`, a file, each text is encoded once.
    """

    def __init__(self, encoder: Encoder, cache: Path | None = None) -> None:
        """Raises PolicyError if the cache cannot be opened."""
        self._encoder = encoder
        self._lock = threading.Lock()
        self._ids: list[str] = []
        self._places: dict[str, int] = {}
        self._rows: Floats = np.zeros((0, encoder.size), np.float32)
        self._cache = _CachedEncoder(cache, encoder) if cache else None

    def add(self, texts: dict[str, str]) -> None:
        vectors = self._encoded([*texts.values()])
        with self._lock:
            for id, vector in zip(texts, vectors, strict=True):
                place = self._places.setdefault(id, len(self._ids))
                if place == len(self._ids):
                    self._ids.append(id)
                    self._grow()
                self._rows[place] = vector

    def remove(self, id: str) -> None:
        with self._lock:
            place = self._places.pop(id)
            last = self._ids.pop()
            if last != id:  # the last one moves into the gap
                self._ids[place], self._places[last] = last, place
                self._rows[place] = self._rows[len(self._ids)]

    def nearest(self, query: str, count: int, allowed: Set[str] | None) -> list[tuple[str, float]]:
        vector = self._encoder.encode([query])[0]
        with self._lock:
            likeness = self._rows[: len(self._ids)] @ vector
            places = range(len(self._ids)) if allowed is None else self._held(allowed)
            # Rounded, because sums of floats differ in their last digits from machine to machine.
            rounded = {place: round(float(likeness[place]), 5) for place in places}
            best = sorted(rounded, key=lambda place: (-rounded[place], self._ids[place]))[:count]
            return [(self._ids[place], rounded[place]) for place in best]

    def _held(self, allowed: Set[str]) -> list[int]:
        return [self._places[id] for id in allowed if id in self._places]

    def _grow(self) -> None:
        if len(self._ids) > len(self._rows):
            more = np.zeros((max(64, len(self._rows)), self._encoder.size), np.float32)
            self._rows = np.concatenate([self._rows, more])

    def _encoded(self, texts: list[str]) -> Floats:
        return self._cache.encoded(texts) if self._cache else self._encoder.encode(texts)


class VectorCache:
    """Vectors by key.  Safe from many threads, and the file from many processes.

    Only opening the file can fail.  A vector that cannot be read or written later (no room, a damaged
    file, another process that holds the lock) is a cache miss: the caller encodes the text again.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file; raises PolicyError if that fails."""
        self._database = Database(
            str(path),
            "vector cache",
            _CACHE_FORMAT,
            _CACHE_SCHEMA,
            unmarked="vectors",
            error=PolicyError,
        )
        weakref.finalize(self, self._database.close)  # the API has no `close`

    def get(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the cached vectors of these keys."""
        query = "SELECT vector FROM vectors WHERE text = ?"
        with contextlib.suppress(PolicyError), self._database.reading() as db:
            rows = {key: db.execute(query, (key,)).fetchone() for key in keys}
            return {key: row[0] for key, row in rows.items() if row}
        return {}

    def put(self, vectors: Mapping[bytes, bytes]) -> None:
        """Cache vectors by key."""
        with contextlib.suppress(PolicyError), self._database.writing("write to") as db:
            db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", vectors.items())


class _CachedEncoder:
    """Encodes each text once; the keys contain the model's digest, so models never share vectors."""

    def __init__(self, path: Path, encoder: Encoder) -> None:
        self._encoder = encoder
        self._cache = VectorCache(path)

    def encoded(self, texts: list[str]) -> Floats:
        keys = {self._key(text): text for text in texts}
        known = {
            key: np.frombuffer(data, "<f4").astype(np.float32)
            for key, data in self._cache.get(keys).items()
            if len(data) == 4 * self._encoder.size
        }
        new = {key: text for key, text in keys.items() if key not in known}
        made = dict(zip(new, self._encoder.encode([*new.values()]), strict=True))
        self._cache.put({key: vector.astype("<f4").tobytes() for key, vector in made.items()})
        found = known | made
        rows = [found[self._key(text)] for text in texts]
        return np.stack(rows) if rows else self._encoder.encode([])

    def _key(self, text: str) -> bytes:
        return hashlib.sha256(f"{self._encoder.digest} {_sound(text)}".encode()).digest()


def _tensors(path: Path) -> dict[str, Floats]:
    """Return the tensors of a safetensors file, memory-mapped: a length, a JSON header, numbers."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:end]))
    header.pop("__metadata__", None)
    return {
        name.removeprefix("bert."): _tensor(data[end:], entry)
        for name, entry in header.items() if entry["dtype"] in _TYPES
    }  # fmt: skip


def _tensor(data: memoryview, entry: dict[str, Any]) -> Floats:
    first, last = entry["data_offsets"]
    numbers: npt.NDArray[Any] = np.frombuffer(data[first:last], np.dtype(_TYPES[entry["dtype"]]))
    return np.asarray(numbers.reshape(entry["shape"]), np.float32)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sound(text: str) -> str:
    """Return a text without lone surrogates, which a tokenizer refuses."""
    return text.encode("utf-8", "ignore").decode()


def _gelu(x: Floats) -> Floats:
    """Return x times the normal distribution at x; erf as Abramowitz and Stegun have it, 7.1.26."""
    z = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t
    erf = np.sign(x) * (1 - (series + 0.254829592) * t * np.exp(-z * z))
    return np.asarray(x * (1 + erf) / 2, np.float32)
