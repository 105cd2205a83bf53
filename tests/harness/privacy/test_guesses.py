"""A program, or a model, that holds a token and guesses the value behind it gets no answer.

Each test shows first that the guess is confirmed if what programs write gets the tokens of the host's
values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellwright import Privacy, Sandbox, Workspaces, tool
from cellwright.harness.privacy import naming
from cellwright.harness.privacy.naming import HOST, Naming
from cellwright.harness.tools import sanitizer
from cellwright.policies.tool_rules import Tools
from tests.conftest import policy_named

pytestmark = pytest.mark.needs("userns")

PHONE, MAIL, NAME, WRONG = "+44 20 7946 0958", "ann@example.org", "Ann Smith", "Ann Smyth"
FIELDS = {"find:name": "name"}


@tool
def find(number: int) -> dict:  # type: ignore[type-arg]
    """Find a customer."""
    return {"phone": PHONE, "mail": MAIL, "name": NAME, "note": f"{NAME} has the phone {PHONE}"}


@tool
def echo(text: str, again: list[str] = []) -> dict:  # type: ignore[type-arg]  # noqa: B006
    """Return what is asked, and what else is known."""
    import base64

    data = base64.b64encode(f"about {text} and more".encode()).decode()
    return {"text": text, "upper": text.upper(), "again": again, "code": data, "phone": PHONE}


@tool
def fail(text: str) -> str:
    """Fail."""
    raise RuntimeError(f"cannot do {text}")


@tool
def repeat(text: str, times: int) -> str:
    """Return a long text."""
    return text * times


ASK = """
import tools
customer = tools.find(number=1)
token = customer[{kind!r}]

def said(call):
    try:
        return str(call())
    except Exception as error:
        return str(error)

def answer(guess):
    return {call}

answers = [answer(each) for each in {guesses!r}]
[token, answers]
"""
WAYS = {
    "a result": "said(lambda: tools.echo(text=guess))",
    "a list": "said(lambda: tools.echo(text='', again=['x', guess]))",
    "a longer text": "said(lambda: tools.echo(text=f'call {guess} now, {guess}!'))",
    "beside an address": "said(lambda: tools.echo(text=guess + ' bob@example.org'))",
    "base64": "said(lambda: tools.echo(text=__import__('base64').b64encode(guess.encode()).decode()))",
    "an error of the tool": "said(lambda: tools.fail(text=guess))",
    "a check": "said(lambda: tools.find(number=guess))",
    "a name of an argument": "said(lambda: tools.find(number=1, **{guess: 1}))",
    "the name of a tool": "said(lambda: tools.call_tool(guess))",
    "a search": "said(lambda: tools.search_tools(guess))",
}


def asked(way: str, kind: str, guesses: list[str]) -> tuple[str, list[str]]:
    code = ASK.format(kind=kind, call=WAYS[way], guesses=guesses)
    privacy = Privacy(fields=FIELDS)
    with Sandbox(pool=0, tools=[find, echo, fail, repeat], privacy=privacy) as sandbox:
        result = sandbox.execute(code)
    assert result.ok, result.error
    token, answers = result.value
    return token, answers


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give what programs write the tokens of the host's values."""

    def apply() -> None:
        monkeypatch.setattr(sanitizer, "CallNaming", lambda look: HOST)

    return apply


@pytest.mark.parametrize(
    "way", [each for each in WAYS if each not in ("a search", "the name of a tool")]
)
def test_a_program_that_guesses_a_number_gets_no_answer(
    way: str, without: Callable[[], None]
) -> None:
    guesses = [PHONE.replace("8", "7"), PHONE]
    token, answers = asked(way, "phone", guesses)
    # `echo` also returns the phone that it knows: no answer may tell whether the two are equal.
    found = [answer.count(token) for answer in answers]
    assert found == [0, 0]
    assert PHONE not in "".join(answers)
    without()
    token, answers = asked(way, "phone", guesses)
    if way != "base64":  # there, the whole run is replaced
        assert answers[1].count(token) > answers[0].count(token)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_guesses_a_declared_name_gets_no_answer(
    way: str, without: Callable[[], None]
) -> None:
    token, (right, wrong) = asked(way, "name", [NAME, WRONG])
    assert right.count(token) == wrong.count(token)
    assert right.count("pii_name") == wrong.count("pii_name")
    without()
    token, (right, wrong) = asked(way, "name", [NAME, WRONG])
    if way not in ("base64", "the name of a tool", "a search"):
        assert right.count(token) > wrong.count(token)


def test_what_is_read_again_of_a_long_result_answers_nothing() -> None:
    code = """
import re
import tools
token = tools.find(number=1)["name"]
said = []
for guess in ("Ann Smith", "Ann Smyth"):
    try:
        tools.repeat(text=guess + " ", times=1000)
    except tools.ToolError as error:
        result_id = re.search("results.read_all..([^']+)", str(error))[1]
        said.append(str(tools.results.read_all(result_id))[:2000])
[token, said]
"""
    policy = policy_named("standard", tools=Tools(result_bytes=5000))
    privacy = Privacy(fields=FIELDS)
    with Sandbox(policy=policy, pool=0, tools=[find, repeat], privacy=privacy) as sandbox:
        result = sandbox.execute(code)
    assert result.ok, result.error
    token, said = result.value
    assert len(said) == 2
    assert said[0].replace(NAME, WRONG) == said[1]
    assert token not in said[0]


def test_a_tool_that_knows_a_number_is_not_asked_by_its_words_alone() -> None:
    """Without its plus a number is found by its words if it is known, and not at all if it is not."""
    code = ASK.format(
        kind="phone", call="said(lambda: tools.echo(text=guess))", guesses=["44 20 7946 0957", "44 20 7946 0958"],
    )  # fmt: skip
    with Sandbox(pool=0, tools=[find, echo], privacy=Privacy()) as sandbox:
        token, (wrong, right) = sandbox.execute(code).value
    assert (wrong.count("0957"), right.count("0958")) == (2, 2)
    assert right.count(token) == wrong.count(token) == 1  # the number that the tool knows


def test_a_token_of_a_call_can_be_used_and_stays_apart() -> None:
    """A tool gets the value of such a token, and its answer is apart from the others, too."""
    code = f"""
import tools
token = tools.find(number=1)["phone"]
own = tools.echo(text={PHONE!r})["text"]
back = tools.echo(text=own)
[token, own, back["text"], back["phone"]]
"""
    privacy = Privacy(restore=["echo:text"])
    with Sandbox(pool=0, tools=[find, echo], privacy=privacy) as sandbox:
        tokens = sandbox.execute(code).value
    assert len(set(tokens)) == 4
    assert {privacy.reveal(each) for each in tokens} == {PHONE}


def test_values_of_the_host_have_one_token_in_calls_without_values_of_the_program() -> None:
    code = """
import tools
one, other = tools.find(number=1), tools.find(number=2)
back = tools.echo(text=one["mail"])
[one == other, back["text"] == one["mail"], back["phone"] == one["phone"], one["phone"] in one["note"]]
"""
    for restore in ([], ["echo:text"]):
        privacy = Privacy(fields=FIELDS, restore=restore)
        with Sandbox(pool=0, tools=[find, echo], privacy=privacy) as sandbox:
            assert sandbox.execute(code).value == [True] * 4


@pytest.mark.parametrize("is_protected", [True, False])
def test_a_model_that_prints_guesses_gets_no_answer(
    is_protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_protected:
        monkeypatch.setattr(naming._NamingOfPrograms, "normal", Naming.normal)
    heard: list[bytes] = []
    code = f"import tools\nprint({PHONE!r}, {MAIL!r})\ntools.find(number=1)"
    with Sandbox(pool=0, tools=[find], privacy=Privacy()) as sandbox:
        sandbox.execute("import tools\ntools.find(number=1)")
        result = sandbox.execute(code, on_output=lambda _, data: heard.append(data))
    shown = result.for_model()
    assert isinstance(result.value, dict)
    known = {result.value["phone"], result.value["mail"]}
    for text in (shown.stdout, b"".join(heard).decode()):
        assert text.count("pii_") == 2
        assert any(each in text for each in known) is not is_protected
    assert shown.stdout == b"".join(heard).decode()


@pytest.mark.parametrize("is_protected", [True, False])
def test_a_program_that_left_guesses_in_a_named_workspace_gets_no_answer(
    is_protected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_protected:
        monkeypatch.setattr(naming._NamingOfPrograms, "normal", Naming.normal)
    with Sandbox(
        pool=0, tools=[find], privacy=Privacy(), workspaces=Workspaces(tmp_path)
    ) as sandbox:
        sandbox.execute(f"open('g.txt', 'w').write('[{PHONE}]')", workspace="w")
        code = "import tools\n[tools.find(number=1)['phone'], open('g.txt').read()]"
        token, read = sandbox.execute(code, workspace="w").value
    assert read.startswith("[pii_phone_")
    assert (token in read) is not is_protected


def test_a_value_is_forgotten_under_each_of_its_tokens() -> None:
    privacy = Privacy()
    scope = privacy.scope()
    said: list[Any] = [scope.text(PHONE), scope.text(PHONE, naming.PROGRAM)]
    assert len(set(said)) == 2
    assert privacy.forget("+442079460958") == 2
    assert [scope.value(each) for each in said] == [None, None]
