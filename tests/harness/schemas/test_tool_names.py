"""Names of tools: what is one, what is the same one, and what is refused."""

import pytest

from cellwright.errors import ToolInvalid
from cellwright.harness.schemas.spec import Reference, function_name, key_of, normalised, reference

HOSTILE = [
    "", ".", "..", "../x", "a/b", "a\\b", "a..b", "a.", "/etc/passwd", "~root", "-rf", "--help", "_a",
    "a b", "a\n", "a\0", "a\tb", "a;b", "$(id)", "`id`", "a'b", 'a"b', "{a}", "%s", "a@1", "a:b", "a*",
    "d\u043euble", "\uff44ouble", "dou\u202eble", "dou\u200bble", "doubl\xe9", "\u0130", "\u017f", "\u212a",
    "\ud800",
    "x" * 65, "__class__", ".hidden",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_name_that_could_mean_something_else_is_refused(name: str) -> None:
    with pytest.raises(ToolInvalid) as caught:
        normalised(name)
    assert str(caught.value).isascii()
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 1, b"double", ["double"]])
def test_a_value_that_is_not_text_is_refused(name: object) -> None:
    with pytest.raises(ToolInvalid, match="not a valid tool name"):
        normalised(name)


def test_only_letters_are_changed() -> None:
    assert normalised("getWeather") == "getweather"
    assert normalised("Server.list-mail_messages2") == "server.list-mail_messages2"
    assert normalised("x" * 64) == "x" * 64


def test_names_that_look_alike_are_one_name() -> None:
    alike = ("send-mail", "send_mail", "Send.Mail", "SEND_mail", "send--mail")
    assert {key_of(name) for name in alike} == {"send_mail"}
    assert key_of("sendmail") != "send_mail"


def test_a_function_has_the_name_with_what_python_allows() -> None:
    assert function_name("mail.send-now") == "mail_send_now"


def test_a_reference_may_name_a_version() -> None:
    assert reference("Double@2") == Reference("double", 2)
    assert reference("double") == Reference("double")
    assert str(reference("double@2")) == "double@2"


@pytest.mark.parametrize("text", ["double@", "double@0", "double@x", "double@1@2", "double@-1",
                                  "double@1.0", "double@٣", "double@9999999999", "@1"])  # fmt: skip
def test_a_version_is_a_number_from_one(text: str) -> None:
    with pytest.raises(ToolInvalid):
        reference(text)
