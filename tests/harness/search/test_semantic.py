"""A small BERT, made of chance for these tests, is computed as its definition says.

Only the last test needs one that has learned anything.
"""

import contextlib
import json
import math
import os
import random
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from cellwright import Broker, PolicyError, ToolFactory, ToolRegistry
from cellwright.benchmarks.catalogues import questions
from cellwright.harness.search.documents import Document
from cellwright.harness.search.encoder import Encoder, VectorCache, VectorIndex
from cellwright.harness.search.search import Model, SearchIndex
from tests.conftest import MODEL, ROOT, SHARED

SIZE, HEADS, LAYERS, INNER, POSITIONS = 8, 2, 2, 16, 32
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "send", "a", "mail", "file", "read", "##s"]
Rows = list[list[float]]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embeddings.word_embeddings.weight", (len(VOCABULARY), SIZE)
    yield "embeddings.position_embeddings.weight", (POSITIONS, SIZE)
    yield "embeddings.token_type_embeddings.weight", (2, SIZE)
    norms, layers = ["embeddings.LayerNorm"], []
    for number in range(LAYERS):
        name = f"encoder.layer.{number}"
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
        layers += [
            (f"{name}.attention.self.{part}", SIZE, SIZE) for part in ("query", "key", "value")
        ]
        layers += [
            (f"{name}.attention.output.dense", SIZE, SIZE),
            (f"{name}.intermediate.dense", INNER, SIZE),
            (f"{name}.output.dense", SIZE, INNER),
        ]
    for norm in norms:
        yield f"{norm}.weight", (SIZE,)
        yield f"{norm}.bias", (SIZE,)
    for layer, outputs, inputs in layers:
        yield f"{layer}.weight", (outputs, inputs)
        yield f"{layer}.bias", (outputs,)


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    chance = random.Random(1)
    return {
        name: np.array(
            [chance.gauss(0, 1) for _ in range(math.prod(shape))], np.float32
        ).reshape(shape)
        for name, shape in shapes()
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    return write(tmp_path_factory.mktemp("model"), weights)


def write(path: Path, weights: dict[str, np.ndarray]) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in weights.items():
        raw = tensor.tobytes()
        header[name] = {
            "dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(raw)],
        }  # fmt: skip
        data += raw
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    (path / "config.json").write_text(
        json.dumps({"num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS})
    )  # fmt: skip
    pieces = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]"
        )
    )
    pieces.normalizer = tokenizers.normalizers.BertNormalizer()
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    pieces.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    pieces.save(str(path / "tokenizer.json"))
    return path


# The definition, in plain Python, one text and one number at a time


def defined(weights: dict[str, np.ndarray], ids: list[int]) -> list[float]:
    plain = {name: tensor.tolist() for name, tensor in weights.items()}
    states = [
        [
            plain["embeddings.word_embeddings.weight"][id][n]
            + plain["embeddings.position_embeddings.weight"][place][n]
            + plain["embeddings.token_type_embeddings.weight"][0][n]
            for n in range(SIZE)
        ]
        for place, id in enumerate(ids)
    ]
    states = normed(plain, "embeddings.LayerNorm", states)
    for number in range(LAYERS):
        states = layer(plain, f"encoder.layer.{number}", states)
    mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
    length = math.sqrt(sum(each * each for each in mean))
    return [each / length for each in mean]


def layer(plain: dict[str, Rows], name: str, states: Rows) -> Rows:
    query, key, value = (
        linear(plain, f"{name}.attention.self.{part}", states) for part in ("query", "key", "value")
    )
    width = SIZE // HEADS
    mixed: Rows = [[0.0] * SIZE for _ in states]
    for head in range(HEADS):
        span = range(head * width, (head + 1) * width)
        for row, asked in enumerate(query):
            scores = [sum(asked[n] * held[n] for n in span) / math.sqrt(width) for held in key]
            shares = [math.exp(score) for score in scores]
            for n in span:
                mixed[row][n] = sum(
                    share * held[n] for share, held in zip(shares, value, strict=True)
                ) / sum(shares)
    attended = linear(plain, f"{name}.attention.output.dense", mixed)
    states = normed(plain, f"{name}.attention.output.LayerNorm", added(states, attended))
    inner = linear(plain, f"{name}.intermediate.dense", states)
    inner = [[x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in row] for row in inner]
    inner = linear(plain, f"{name}.output.dense", inner)
    return normed(plain, f"{name}.output.LayerNorm", added(states, inner))


def added(one: Rows, other: Rows) -> Rows:
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


def linear(plain: dict[str, Rows], name: str, states: Rows) -> Rows:
    weight, bias = plain[f"{name}.weight"], plain[f"{name}.bias"]
    return [
        [sum(a * b for a, b in zip(row, line, strict=True)) + more for line, more in zip(weight, bias, strict=True)]  # type: ignore[misc]
        for row in states
    ]  # fmt: skip


def normed(plain: dict[str, Rows], name: str, states: Rows) -> Rows:
    found = []
    for row in states:
        mean = sum(row) / len(row)
        spread = math.sqrt(sum((x - mean) ** 2 for x in row) / len(row) + 1e-12)
        found.append(
            [
                (x - mean) / spread * w + b
                for x, w, b in zip(row, plain[f"{name}.weight"], plain[f"{name}.bias"], strict=True)  # type: ignore[misc]
            ]
        )
    return found


# The encoder


def test_vectors_are_what_the_definition_says(folder: Path, weights: dict[str, np.ndarray]) -> None:
    texts = {
        "send a mail": [2, 4, 5, 6, 3],
        "Read files": [2, 8, 7, 9, 3],
        "": [2, 3],
        "nothing known": [2, 1, 1, 3],
    }
    vectors = Encoder(folder).encode([*texts])  # texts of several lengths, so that some are padded
    for vector, ids in zip(vectors, texts.values(), strict=True):
        np.testing.assert_allclose(vector, defined(weights, ids), atol=2e-5)


def test_a_text_has_the_same_vector_in_any_company(folder: Path) -> None:
    encoder = Encoder(folder)
    alone = encoder.encode(["send a mail"])[0]
    crowd = encoder.encode(["read " * 200, "send a mail", *["file"] * 40])
    np.testing.assert_allclose(crowd[1], alone, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(crowd, axis=1), 1, atol=1e-5)


def test_hostile_texts_have_vectors(folder: Path) -> None:
    texts = ["\ud800", "\x00", "\u202e", "mail " * 100_000, "a" * 1_000_000]
    assert Encoder(folder).encode(texts).shape == (5, SIZE)
    assert Encoder(folder).encode([]).shape == (0, SIZE)


def test_names_of_weights_may_have_bert_before_them(
    tmp_path: Path, folder: Path, weights: dict[str, np.ndarray]
) -> None:
    other = write(tmp_path, {f"bert.{name}": tensor for name, tensor in weights.items()})
    np.testing.assert_array_equal(Encoder(other).encode(["mail"]), Encoder(folder).encode(["mail"]))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"has no config.json, tokenizer.json, model.safetensors"):
        Encoder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("data", [b"{}", b"\xff" * 64, b"[]      ", b"\x02" + bytes(7) + b"[]"])
def test_a_model_that_cannot_be_read_is_refused(
    tmp_path: Path, weights: dict[str, np.ndarray], name: str, data: bytes
) -> None:
    (write(tmp_path, weights) / name).write_bytes(data)
    with pytest.raises(PolicyError, match="cannot read a BERT from"):
        Encoder(tmp_path)


# VectorIndex


class Counting:
    """An encoder that keeps what it was asked."""

    def __init__(self, encoder: Encoder) -> None:
        self.size, self.digest = encoder.size, encoder.digest
        self.asked: list[str] = []
        self._encoder = encoder

    def encode(self, texts: list[str]) -> np.ndarray:
        self.asked += texts
        return self._encoder.encode(texts)


def test_the_nearest_is_the_same_text(folder: Path) -> None:
    vectors = VectorIndex(Encoder(folder))
    vectors.add({"m": "send a mail", "f": "read files", "n": "a"})
    assert vectors.nearest("read files", 1, None) == [("f", pytest.approx(1, abs=1e-4))]
    assert [id for id, _ in vectors.nearest("read files", 5, {"m", "n", "unknown"})] != ["f"]
    assert len(vectors.nearest("mail", 5, None)) == 3


def test_texts_are_replaced_and_forgotten(folder: Path) -> None:
    vectors = VectorIndex(Encoder(folder))
    texts = {f"t{n}": "send " * n for n in range(200)}
    vectors.add(texts)
    vectors.add({"t7": "read files"})
    for n in range(0, 200, 2):
        vectors.remove(f"t{n}")
    assert {id for id, _ in vectors.nearest("mail", 500, None)} == {
        f"t{n}" for n in range(1, 200, 2)
    }
    assert vectors.nearest("read files", 1, None)[0][0] == "t7"
    for n in (3, 21):
        assert vectors.nearest(texts[f"t{n}"], 1, {f"t{n}"})[0][1] == pytest.approx(1, abs=1e-4)


def test_a_text_is_encoded_once_for_each_model(
    tmp_path: Path, folder: Path, weights: dict[str, np.ndarray]
) -> None:
    cache = tmp_path / "vectors.db"
    first, again = Counting(Encoder(folder)), Counting(Encoder(folder))
    VectorIndex(first, cache).add({"a": "send mail", "b": "read", "c": "send mail"})  # type: ignore[arg-type]
    assert first.asked == ["send mail", "read"]
    known = VectorIndex(again, cache)  # type: ignore[arg-type]
    known.add({"x": "read", "y": "file"})
    assert again.asked == ["file"]
    assert known.nearest("read", 1, None)[0][0] == "x"
    changed = {name: tensor * 2 for name, tensor in weights.items()}
    (tmp_path / "other").mkdir()
    other = Counting(Encoder(write(tmp_path / "other", changed)))
    VectorIndex(other, cache).add({"a": "read"})  # type: ignore[arg-type]
    assert other.asked == ["read"]


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text").write_bytes(b"no database" * 1000)
    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE other (text)")
    for path in (tmp_path, tmp_path / "text", tmp_path / "other"):
        with pytest.raises(PolicyError, match="vector cache"):
            VectorIndex(Encoder(folder), path)


def test_a_cache_from_before_the_format_number_is_adopted(tmp_path: Path) -> None:
    path = tmp_path / "vectors.db"
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.execute("CREATE TABLE vectors (text BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")
        old.execute("INSERT INTO vectors VALUES (?, ?)", (b"key", b"vector"))
    for _ in range(2):  # adopted, then known by its number
        assert VectorCache(path).get([b"key", b"other"]) == {b"key": b"vector"}


def test_a_cache_that_is_damaged_later_is_a_cache_without_entries(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path / "vectors.db")
    cache.put({b"key": b"vector"})
    with contextlib.closing(sqlite3.connect(tmp_path / "vectors.db")) as other, other:
        other.execute("DROP TABLE vectors")
    assert cache.get([b"key"]) == {}
    cache.put({b"key": b"vector"})


def test_an_index_takes_vectors(folder: Path) -> None:
    index = SearchIndex([Document(id="m", name="send_mail")], VectorIndex(Encoder(folder)))
    assert index.search("send mail").matches[0].document.id == "m"
    index.remove("m")
    assert index.search("send mail").matches == ()


@pytest.mark.parametrize("given", [str, Path, Model])
def test_a_folder_switches_meaning_on_for_everything_that_searches(
    folder: Path, given: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    nearest = VectorIndex.nearest

    def noted(self: VectorIndex, query: str, *rest: Any) -> Any:
        asked.append(query)
        return nearest(self, query, *rest)

    def send_mail() -> None:
        """Send a mail."""

    monkeypatch.setattr(VectorIndex, "nearest", noted)
    with (
        ToolFactory(model=given(folder), pool=0) as own,
        ToolRegistry(model=given(folder)) as registry,
        ToolFactory(registry=registry, pool=0) as shared,
    ):
        for factory in (own, shared):
            factory.registry.register(send_mail)
            assert factory.search("send mail")["tools"][0]["name"] == "send_mail"
            found = factory.broker.call("tools.search", {"query": "a mail"})
            assert "send_mail" in found["tools"][0]
    assert Broker([send_mail], model=given(folder)).call("tools.search", {"query": "mail"})["tools"]
    assert asked == ["send mail", "a mail", "send mail", "a mail", "mail"]


def test_the_command_searches_by_meaning_and_keeps_the_vectors(
    folder: Path, tmp_path: Path
) -> None:
    variables = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "cellwright", "tools", "search", "mail", "--model"]
    for where, status, said in (
        (folder, 0, "there is nothing"),
        (tmp_path, 2, "has no config.json"),
    ):
        done = subprocess.run(
            [*command, str(where)], env=variables, cwd=ROOT, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert (tmp_path / "cellwright" / "vectors.db").exists()


@pytest.mark.needs("model")
def test_a_model_that_has_learned_knows_what_is_alike() -> None:
    assert MODEL
    texts = [
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    ]
    one, dog, same, other = Encoder(Path(MODEL)).encode(texts)
    for two, likeness in ((dog, 0.6946), (same, 0.9429), (other, 0.2569)):  # the model's card
        assert one @ two == pytest.approx(likeness, abs=2e-3)


@pytest.mark.slow
@pytest.mark.needs("model", "shared")
def test_words_and_meaning_find_more_of_what_people_ask_for(tmp_path: Path) -> None:
    """Every tenth question, of as many as `cellwright bench search` asks."""
    assert MODEL
    asked = questions(SHARED / "data")
    index = SearchIndex(asked.documents, VectorIndex(Encoder(Path(MODEL)), tmp_path / "vectors.db"))
    found = [
        [match.document.id in answers for match in index.search(text, limit=10).matches]
        for text, answers in asked.questions[::10]
    ]
    shares = [sum(any(each[:count]) for each in found) / len(found) for count in (1, 5, 10)]
    assert shares[0] > 0.65, shares
    assert shares[1] > 0.9, shares
    assert shares[2] > 0.94, shares
