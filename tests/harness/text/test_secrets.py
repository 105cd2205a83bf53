"""Secrets in text: those that are found, those that only look like one, and the time that it takes."""

import base64
import hashlib
import random
import string
import uuid

import pytest

from cellwright.harness.text.secrets import (
    find_secrets,
    names_no_secret,
    random_words,
    secret_named,
)
from tests.conftest import ROOT

CHANCE = random.Random(7)
CODE = ("policies", "runner", "harness", "benchmarks")


def made_of(alphabet: str, length: int) -> str:
    return "".join(CHANCE.choice(alphabet) for _ in range(length))


LETTERS = string.ascii_letters + string.digits
CAPITALS = string.ascii_uppercase + string.digits
# Put together here, so that no file of ours holds one whole.
SECRETS = {
    "aws_key": ["AK" + "IA" + made_of(CAPITALS, 16), "AS" + "IA" + made_of(CAPITALS, 16)],
    "github_token": ["gh" + "p_" + made_of(LETTERS, 36), "github" + "_pat_" + made_of(LETTERS, 82)],
    "gitlab_token": ["gl" + "pat-" + made_of(LETTERS, 20)],
    "slack_token": ["xo" + "xb-123456789012-" + made_of(LETTERS, 24)],
    "google_key": ["AI" + "za" + made_of(LETTERS + "_-", 34) + "x"],
    "google_token": ["ya" + "29." + made_of(LETTERS, 60)],
    "stripe_key": ["sk" + "_live_" + made_of(LETTERS, 24), "rk" + "_test_" + made_of(LETTERS, 24)],
    "model_key": [
        "sk" + "-" + made_of(LETTERS, 48),
        "sk" + "-ant-api03-" + made_of(LETTERS + "_-", 92) + "9A",
        "sk" + "-proj-" + made_of(LETTERS, 60) + "1",
    ],
    "huggingface_token": ["h" + "f_" + made_of(LETTERS, 34)],
    "npm_token": ["np" + "m_" + made_of(LETTERS, 36)],
    "sendgrid_key": ["S" + "G." + made_of(LETTERS, 22) + "." + made_of(LETTERS, 43)],
    "jwt": [
        ".".join(
            base64.urlsafe_b64encode(part).decode().rstrip("=")
            for part in (b'{"alg":"HS256"}', b'{"sub":"1234567890"}', CHANCE.randbytes(32))
        )
    ],
    "private_key": [
        f"-----BEGIN {kind}PRIVATE" + f" KEY-----\n{made_of(LETTERS, 64)}\n-----END {kind}PRIVATE KEY-----"
        for kind in ("", "RSA ", "OPENSSH ", "EC ")
    ],
    "random": [made_of(LETTERS, length) + "aB3dE9" for length in (26, 34, 58)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "secret"), [(kind, each) for kind, secrets in SECRETS.items() for each in secrets]
)
@pytest.mark.parametrize("around", ["{}", "the key is {}, keep it", 'export X="{}"\n', "[{}]"])
def test_a_secret_is_found_by_its_form(kind: str, secret: str, around: str) -> None:
    text = around.format(secret)
    (leak,) = find_secrets(text)
    assert leak.kind == kind
    assert text[leak.start : leak.end] == secret


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgres://ann:h4x-Pa55@db.local/x", "h4x-Pa55"),
        ("DB_PASSWORD=hunter2hunter2", "hunter2hunter2"),
        ('{"api_key": "0a1b2c3d4e5f"}', "0a1b2c3d4e5f"),
        ("client_secret: 'q8!rT2zz'", "q8!rT2zz"),
        ("https://x.test/?access_token=9f8e7d6c5b&page=2", "9f8e7d6c5b"),
        ("Authorization: Bearer abc123def456", "abc123def456"),
        ("https://hooks.slack.com/services/" + "T012/B345/abcDEF789ghi", "T012/B345/abcDEF789ghi"),
    ],
)
def test_a_secret_is_found_by_what_stands_before_it(text: str, secret: str) -> None:
    (leak,) = find_secrets(text)
    assert text[leak.start : leak.end] == secret


PNG = base64.b64encode(CHANCE.randbytes(3000)).decode()
LOOKALIKES = [
    str(uuid.UUID(bytes=CHANCE.randbytes(16))),
    hashlib.sha256(b"x").hexdigest(),
    hashlib.sha1(b"x").hexdigest().upper(),
    PNG,
    "\n".join(PNG[start : start + 76] for start in range(0, len(PNG), 76)),
    "data:image/png;base64," + PNG[:100],
    "sha512-" + base64.b64encode(hashlib.sha512(b"x").digest()).decode(),
    "SHA256:" + base64.b64encode(hashlib.sha256(b"x").digest()).decode().rstrip("="),
    "/usr/lib/python3.11/site-packages/cellwright/harness/tools/randomness.py",
    "test_a_call_in_which_the_process_was_killed_is_made_again_only_if_that_does_no_harm",
    "AbstractSingletonProxyFactoryBean2FactoryImplementation3",
    "password = get_password(user)",
    "password: str = settings.database.password2",
    "api_key=os.environ['API_KEY']",
    "secret: required, at least 12 characters",
    "postgres://user:password@localhost/db",
    "the tokens/keys 1234567890123456789012345678901234567890",
    "https://example.com/a/Very/Long2/Path3/with/Many/Parts4?page=2&size=100",
    "sk-fading-circle-and-other-names-of-styles",
]


@pytest.mark.parametrize("text", LOOKALIKES)
def test_what_only_looks_like_a_secret_is_left(text: str) -> None:
    assert find_secrets(text) == []


def test_our_own_code_holds_next_to_none() -> None:
    """A hundred thousand words in which whatever is found is found for nothing."""
    paths = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [path.read_text() for path in paths]
    found = [text[leak.start : leak.end] for text in texts for leak in find_secrets(text)]
    assert sum(len(text.split()) for text in texts) > 50_000
    assert len(found) <= 5, found


def test_random_keys_are_found_and_names_are_not() -> None:
    found = sum(bool(list(random_words(made_of(LETTERS, 40)))) for _ in range(500))
    assert found > 450


HOSTILE = [
    "eyJ" * 30_000,
    "eyJaaaaaaaaa." * 10_000,
    "-----BEGIN " * 10_000,
    "-----BEGIN RSA PRIVATE" + " KEY-----\n" * 10_000,
    "password=" * 10_000,
    "://" * 30_000,
    "://a:" * 20_000,
    "sk-" * 30_000,
    "xoxb-" * 20_000,
    "Aa1" * 30_000,
    "Authorization: " * 6_000,
    "\n".join(["aB3" * 30] * 1000),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_twice_the_text_takes_twice_the_steps(text: str) -> None:
    """What would take time in the square of it does not end within the test's time at all."""
    find_secrets(text * 10)


@pytest.mark.parametrize("name", ["password", "apiKey", "DB_PASSWORD", "clientSecret", "x-api-key"])
def test_a_name_says_that_something_is_secret(name: str) -> None:
    assert secret_named(name, "correct-horse-battery") == "assignment"
    assert secret_named(name, "required") == ""
    assert secret_named(name, "${FROM_THE_VAULT}") == ""


@pytest.mark.parametrize("name", ["id", "fileId", "nextPageToken", "cursor", "etag", "file_sha256"])
def test_a_name_says_that_something_is_none(name: str) -> None:
    assert names_no_secret(name)
    assert not secret_named(name, "correct-horse-battery")
