"""Values are kept on the host, for their time, and can be erased."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellwright import PolicyError, Privacy
from cellwright.errors import RegistryError
from cellwright.harness.privacy.known_values import KnownValue
from cellwright.harness.privacy.naming import CallNaming, WrittenValues
from cellwright.privacy import PrivacyRules, ValueFile, ValueVault
from tests.conftest import Clock

KEY = "0123456789abcdef" * 4
TEXT = "ann@example.org and bob@example.org"


def test_values_expire_after_they_were_last_found() -> None:
    clock = Clock()
    scope = Privacy(vault=ValueVault(keep_seconds=100, clock=clock)).scope()
    made = scope.text(TEXT)
    clock.now += 90
    scope.text("ann@example.org")
    clock.now += 20
    assert scope.reveal(made) == f"ann@example.org and {made.split()[-1]}"
    assert scope.vault.expire() == 1
    clock.now += 100
    assert scope.reveal(made) == made


def test_forgetting_erases_a_value_in_any_form_of_writing_or_a_session() -> None:
    privacy = Privacy(scope="session", names=["Ann Smith"])
    one, other = privacy.scope("one"), privacy.scope("other")
    made = one.text("Ann Smith: 4111 1111 1111 1111, ann@example.org")
    kept = other.text("ann@example.org")
    assert privacy.forget("4111-1111-1111-1111") == 1
    assert privacy.forget("ANN SMITH") == 1
    assert one.reveal(made).count("pii_") == 2
    assert privacy.forget(session="one") == 1
    assert other.reveal(kept) == "ann@example.org"
    assert privacy.forget() == 1


def test_a_forgotten_name_is_no_longer_looked_for() -> None:
    scope = Privacy(fields={"crm:name": "name"}).scope()
    scope.json({"name": "Ann Smith"}, "crm")
    assert scope.text("Dear Ann Smith") != "Dear Ann Smith"
    scope.vault.forget("Ann Smith")
    assert scope.text("Dear Ann Smith") == "Dear Ann Smith"


def test_a_full_vault_withholds_rather_than_passes_on() -> None:
    from cellwright.harness.privacy.outcomes import WithheldError

    scope = Privacy(vault=ValueVault(most=1)).scope()
    assert "pii_email" in scope.text("ann@example.org")
    with pytest.raises(WithheldError, match="full"):
        scope.text("bob@example.org")


def test_tokens_of_calls_make_room_for_values_of_the_host() -> None:
    """Each call into which a program writes a value makes new tokens: they must not fill the vault."""
    scope = Privacy(vault=ValueVault(most=40)).scope()
    first = scope.text("ann@example.org")
    naming = CallNaming(lambda: WrittenValues(True, frozenset()))
    for _ in range(200):
        token = scope.text("bob@example.org", naming)
        assert scope.value(token) == "bob@example.org"
    assert scope.value(first) == "ann@example.org"
    assert scope.text("cid@example.org").startswith("pii_email_")


def test_a_file_keeps_values_encrypted_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "values"
    with_key = ValueFile(path, KEY)
    made = Privacy(vault=with_key).text(TEXT)
    with_key.close()
    stored = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert b"ann" not in stored
    assert b"example" not in stored
    assert made.split()[0].encode() in stored
    assert os.stat(path).st_mode & 0o077 == 0
    again = Privacy(vault=ValueFile(path, lambda: KEY))
    assert again.reveal(made) == TEXT
    assert again.text(TEXT) == made
    with pytest.raises(PolicyError, match="does not open"):
        ValueFile(path, KEY[::-1])


def test_a_value_cannot_be_moved_to_another_token_in_the_file(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "values"
    vault = ValueFile(path, KEY)
    Privacy(vault=vault).text(TEXT)
    vault.close()
    with sqlite3.connect(path) as db:
        (_, sealed), (other, _) = db.execute("SELECT token, sealed FROM stored").fetchall()
        db.execute("UPDATE stored SET sealed = ? WHERE token = ?", (sealed, other))
    db.close()
    with pytest.raises(PolicyError, match="changed"):
        ValueFile(path, KEY)


def test_an_erased_value_is_gone_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "values"
    vault = ValueFile(path, KEY)
    made = Privacy(vault=vault).text("ann@example.org")
    assert vault.forget("ann@example.org") == 1
    stored = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert made.encode() not in stored
    assert vault.forget() == 0
    vault.close()


def test_a_token_that_another_process_made_is_found_in_the_file(tmp_path: Path) -> None:
    one, other = (Privacy(vault=ValueFile(tmp_path / "values", KEY)) for _ in range(2))
    assert other.reveal(one.text(TEXT)) == TEXT
    one.vault.close()
    other.vault.close()


@pytest.mark.parametrize("key", ["short", lambda: "short", lambda: 1 / 0])
def test_a_missing_or_short_key_is_refused_without_its_text(tmp_path: Path, key: object) -> None:
    with pytest.raises(PolicyError, match="^key: ") as refused:
        ValueFile(tmp_path / "values", key)  # type: ignore[arg-type]
    assert "short'" not in str(refused.value)


def test_the_rules_of_a_policy_name_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PII_KEY", KEY)
    rules = PrivacyRules(enabled=True, vault=str(tmp_path / "values"), key="env:PII_KEY")
    with_file = Privacy(rules=rules)
    made = with_file.text(TEXT)
    with_file.close()
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "key").chmod(0o600)
    again = Privacy(rules=PrivacyRules(
        enabled=True, vault=str(tmp_path / "values"), key=f"file:{tmp_path}/key"
    ))  # fmt: skip
    assert again.reveal(made) == TEXT
    again.close()
    assert repr(again) == "Privacy(ValueFile(0 values), restore=[])"


def test_a_value_that_is_no_unicode_is_kept_in_a_file(tmp_path: Path) -> None:
    scope = Privacy(vault=ValueFile(tmp_path / "values", KEY)).scope()
    made = scope.json({"password": "hunter2\udcfcxQ9"}).value["password"]
    again = Privacy(vault=ValueFile(tmp_path / "values", KEY)).scope()
    assert again.reveal(made) == "hunter2\udcfcxQ9"


@pytest.mark.parametrize("is_file", [False, True])
def test_a_branch_begins_with_the_values_of_its_source_and_then_has_its_own(
    tmp_path: Path, *, is_file: bool
) -> None:
    vault = ValueFile(tmp_path / "values", KEY) if is_file else ValueVault()
    privacy = Privacy(scope="session", vault=vault)
    source = privacy.scope("source")
    before = source.text("ann@example.org")
    branches = [privacy.scope(name) for name in ("one", "two")]
    for each in ("one", "two"):
        privacy.continue_scope("source", each)
    later = [scope.text("bob@example.org") for scope in (source, *branches)]
    assert len(set(later)) == 3
    for scope, own in zip((source, *branches), later, strict=True):
        assert scope.text("ann@example.org") == before
        assert scope.reveal(" ".join([before, *later])).count("@") == 2
        assert scope.reveal(own) == "bob@example.org"
    assert privacy.forget(session="one") == 2
    assert branches[1].reveal(before) == source.reveal(before) == "ann@example.org"
    assert privacy.forget("ann@example.org") == 2
    if is_file:
        again = Privacy(scope="session", vault=ValueFile(tmp_path / "values", KEY)).scope("two")
        assert again.reveal(later[2]) == "bob@example.org"


def test_a_branch_for_which_the_vault_has_no_room_is_refused() -> None:
    privacy = Privacy(scope="session", vault=ValueVault(most=3))
    privacy.scope("source").text("ann@example.org, bob@example.org")
    with pytest.raises(PolicyError, match="full"):
        privacy.continue_scope("source", "branch")
    assert privacy.forget() == 2


def test_a_session_that_is_called_like_a_client_has_values_of_its_own() -> None:
    privacy = Privacy(scope="session")
    made = privacy.scope(of="mcp pipe").text("ann@example.org")
    assert privacy.scope("mcp pipe").reveal(made) == made
    assert Privacy().scope("mcp pipe") is not None


def test_a_value_of_one_client_is_not_looked_for_in_texts_of_another() -> None:
    """Otherwise a program learns what others have by printing it."""
    privacy = Privacy()
    one, other = privacy.scope(of="one"), privacy.scope(of="other")
    one.vault.tokens_for(one.name, [KnownValue("name", "zanzibar", "Zanzibar")])
    assert one.text("to Zanzibar") != "to Zanzibar"
    assert other.text("to Zanzibar") == "to Zanzibar"


def test_what_one_process_erases_is_gone_from_the_others(tmp_path: Path) -> None:
    one, other = (Privacy(vault=ValueFile(tmp_path / "values", KEY)) for _ in range(2))
    made = one.text("4111 1111 1111 1111, ann@example.org")
    assert other.reveal(made).count("pii_") == 0
    assert other.forget("ann@example.org") == 1
    assert one.reveal(made).count("pii_") == 1
    assert one.forget() == 1
    assert other.reveal(made) == made
    declared = one.scope().json(
        {"name": "Ann Smith"}, "t", {"properties": {"name": {"x-pii": "name"}}}
    )
    assert other.text("to Ann Smith") == f"to {declared.value['name']}"
    for each in (one, other):
        each.vault.close()


def test_a_value_that_was_found_again_and_erased_is_gone_from_the_file(tmp_path: Path) -> None:
    clock = Clock()
    vault = ValueFile(tmp_path / "values", KEY, keep_seconds=100, clock=clock)
    scope = Privacy(vault=vault).scope()
    tokens = set()
    for _ in range(20):
        tokens.add(scope.text("ann@example.org").encode())
        clock.now += 50
    assert vault.forget() == 1
    vault.close()
    stored = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert len(tokens) == 1
    assert not any(each in stored for each in tokens)


@pytest.mark.parametrize("change", [
    "UPDATE stored SET sealed = 7", "UPDATE stored SET sealed = x'00'", "UPDATE stored SET until = 'x'",
    "UPDATE stored SET token = x'ff'", "UPDATE stored SET scope = 'other'",
    "DROP TABLE stored", "DROP TABLE stored; CREATE VIEW stored AS SELECT 1",
    "PRAGMA user_version = 9", "ALTER TABLE stored DROP COLUMN until",
])  # fmt: skip
def test_a_changed_file_is_refused(tmp_path: Path, change: str) -> None:
    import sqlite3

    path = tmp_path / "values"
    vault = ValueFile(path, KEY)
    Privacy(vault=vault).text("ann@example.org")
    vault.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    with pytest.raises((PolicyError, RegistryError)):
        ValueFile(path, KEY)


def test_a_file_with_too_many_values_is_refused(tmp_path: Path) -> None:
    vault = ValueFile(tmp_path / "values", KEY)
    Privacy(vault=vault).text(TEXT)
    vault.close()
    with pytest.raises(PolicyError, match="more than 1 values"):
        ValueFile(tmp_path / "values", KEY, most=1)


def test_one_client_cannot_fill_the_vault_of_the_others() -> None:
    from cellwright.harness.privacy.outcomes import WithheldError

    privacy = Privacy(vault=ValueVault(most=8))
    greedy, other = privacy.scope(of="mcp a"), privacy.scope(of="mcp b")
    many = " ".join(f"n{number}@example.org" for number in range(6))
    assert greedy.text(many).count("pii_email_") == 6
    with pytest.raises(WithheldError, match="full"):
        greedy.text("one-more@example.org")
    assert other.text("ann@example.org, bob@example.org").count("pii_email_") == 2
    assert privacy.forget("n1@example.org") == 1
    assert "pii_email_" in greedy.text("new@example.org")


def test_clients_that_race_on_one_file_never_see_values_of_each_other(tmp_path: Path) -> None:
    """Two processes with a file open each, and in each four clients at once."""
    vaults = [ValueFile(tmp_path / "values", KEY) for _ in range(2)]
    made: dict[int, list[tuple[str, str]]] = {}

    def work(number: int) -> None:
        client, mine = f"mcp {number % 4}", list[tuple[str, str]]()
        scope = Privacy(vault=vaults[number % 2]).scope(of=client)
        for turn in range(25):
            mails = (f"c{number % 4}-{turn}@example.org", "shared@example.org")
            mine += [(mail, scope.text(mail)) for mail in mails]
            if turn % 10 == 9:
                vaults[number % 2].forget(f"c{number % 4}-{turn - 5}@example.org")
        made[number] = mine

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    scopes = [Privacy(vault=vaults[0]).scope(of=f"mcp {number}") for number in range(4)]
    assert len(made) == 8
    for number, pairs in made.items():
        for place, scope in enumerate(scopes):
            own = place == number % 4
            assert all(
                scope.reveal(token) in ((mail, token) if own else (token,)) for mail, token in pairs
            )
    assert {len({token for mail, token in pairs if mail == "shared@example.org"})
            for pairs in made.values()} == {1}  # fmt: skip
    for each in vaults:
        each.close()
