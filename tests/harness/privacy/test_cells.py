"""Programs in cells hold tokens; tools that a rule names get the values, and nothing else does."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import (
    AuditLog,
    Broker,
    HostSettings,
    PauseSettings,
    Policy,
    PolicyError,
    Privacy,
    Runs,
    Sandbox,
    ToolFactory,
    Workspaces,
    tool,
)
from cellwright.errors import ToolArgumentsInvalid
from cellwright.privacy import PrivacyRules
from cellwright.runner.requests.result import SandboxResult
from tests.conftest import policy_named

pytestmark = pytest.mark.needs("userns")

MAIL, CARD, NAME = "ann@example.org", 4111111111111111, "Ann Smith"
SENT: list[dict[str, Any]] = []


@tool
def find(name: str) -> dict:  # type: ignore[type-arg]
    """Find a customer; write to help@example.org."""
    return {"name": NAME, "mail": MAIL, "card": CARD, MAIL: "as a name", "asked": name}


@tool
def send(to: str, body: str, amount: int = 0) -> dict:  # type: ignore[type-arg]
    """Send a mail."""
    SENT.append({"to": to, "body": body, "amount": amount})
    import base64

    return {"sent": to, "said": f"to {to}", "code": base64.b64encode(to.encode()).decode(),
            "hex": to.encode().hex(), "escaped": json.dumps(json.dumps(to))}  # fmt: skip


@tool
def fail(to: str) -> str:
    """Fail."""
    raise RuntimeError(f"no mailbox {to}, ask {MAIL}")


@tool(risky=True)
def pay(to: str) -> str:
    """Pay."""
    SENT.append({"to": to})
    return f"paid {to}"


PRIVACY = {
    "restore": ["send:to", "send:amount", "fail:to", "pay:to"],
    "fields": {"find:name": "name"},
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    SENT.clear()
    with Sandbox(pool=0, tools=[find, send, fail], privacy=Privacy(**PRIVACY)) as made:
        yield made


def every_text(result: SandboxResult) -> str:
    """Return all that a result says, as text."""
    return str(result.to_dict())


SECRET = re.compile(
    r"ann@|41111111|Ann Smith|help@", re.IGNORECASE
)  # ids hold four digits by chance


def test_a_program_gets_tokens_of_what_a_tool_returns(sandbox: Sandbox) -> None:
    result = sandbox.execute("import tools\nfound = tools.find(name='x')\nprint(found)\nfound")
    assert result.ok, result.error
    assert not SECRET.search(every_text(result))
    kinds = re.findall("pii_([a-z]+)_", str(result.value))
    assert sorted(kinds) == ["card", "email", "email", "name"]


def test_the_tool_gets_the_value_and_the_program_its_token_again(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        "import tools\nfound = tools.find(name='x')\n"
        "tools.send(to=found['mail'].upper(), body=f\"{found['mail']} {found['name']}\")"
    )
    assert result.ok, result.error
    assert [{"to": MAIL, "body": SENT[0]["body"], "amount": 0}] == SENT
    assert re.fullmatch(r"pii_email_\w+ pii_name_\w+", SENT[0]["body"])
    assert not SECRET.search(every_text(result))
    token = SENT[0]["body"].split()[0]
    assert result.value["sent"] == token
    for name in ("code", "hex", "escaped"):
        assert re.search(r"pii_\w+", result.value[name]), name


def test_a_number_goes_back_into_a_number(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        "import tools\ntools.send(to='x', body='', amount=tools.find(name='')['card'])"
    )
    assert result.ok, result.error
    assert SENT[0]["amount"] == CARD
    result = sandbox.execute(
        "import tools\ntools.send(to='x', body='', amount=tools.find(name='')['mail'])"
    )
    assert "amount: the value of this token is text" in str(result.error)
    assert not SECRET.search(every_text(result))


def test_errors_of_tools_and_of_checks_have_tokens(sandbox: Sandbox) -> None:
    result = sandbox.execute("import tools\ntools.fail(to=tools.find(name='')['mail'])")
    assert "no mailbox pii_email_" in str(result.error)
    assert not SECRET.search(every_text(result))


def test_what_tools_are_for_is_said_without_values(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        "import tools\n[tools.search_tools('customer', detail='full'), tools.describe('find'), tools.browse()]"
    )
    assert "pii_email_" in str(result.value)
    assert not SECRET.search(every_text(result))


def test_inputs_of_the_host_are_tokens_in_the_cell(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        "import os, sys\nprint(mail, open('a.csv').read(), sys.stdin.read(), os.environ['WHO'], sys.argv[1:])",
        inputs={"mail": MAIL}, files={"a.csv": f"a,{MAIL}\n"}, stdin=f"{MAIL}\n", env={"WHO": MAIL},
        arguments=[MAIL],
    )  # fmt: skip
    assert result.ok, result.error
    assert not SECRET.search(every_text(result))
    assert len(set(re.findall(r"pii_email_\w{8}", result.stdout))) == 1
    assert result.stdout.count("pii_email_") == 5


def test_names_of_files_are_tokens_in_the_cell(sandbox: Sandbox) -> None:
    code = "import os\n' '.join(''.join(os.listdir('.')))"  # in a form that nobody finds
    found = sandbox.execute(code, files={f"{MAIL}.txt": "x", "plain.csv": "y"}).value.replace(
        " ", ""
    )
    assert "ann" not in found
    assert "pii_email_" in found
    assert "plain.csv" in found
    with pytest.raises(PolicyError, match="differ in the writing"):
        sandbox.execute("1", files={MAIL: "x", MAIL.upper(): "y"})


@pytest.mark.parametrize(("inputs", "is_told"), [("tokens", False), ("values", True)])
def test_a_made_tool_gets_tokens_whatever_a_rule_restores(inputs: Any, is_told: bool) -> None:
    privacy = Privacy(restore=["send_on:to"], inputs=inputs)
    source = "def send_on(to: str) -> list:\n    return [ord(each) for each in to]"
    policy = policy_named("strict")
    with (
        Sandbox(policy=policy, pool=0, privacy=privacy) as ceiling,
        ToolFactory(ceiling, pool=0) as factory,
        Sandbox(policy=policy, pool=0, privacy=privacy, tools=factory.broker) as sandbox,
    ):
        factory.create_tool("send_on", "Send on.", source)
        code = f"import tools\ntools.send_on(to={privacy.text(MAIL)!r})"
        told = sandbox.execute(code).value
    assert ("".join(map(chr, told)) == MAIL) is is_told


def test_content_that_is_no_text_is_refused_or_passed_on() -> None:
    with (
        Sandbox(pool=0, privacy=Privacy()) as sandbox,
        pytest.raises(PolicyError, match=r"^files: 'a.bin': is no text"),
    ):
        sandbox.execute("1", files={"a.bin": b"\xff\xfe\x00"})
    with Sandbox(pool=0, privacy=Privacy(inputs="texts")) as sandbox:
        assert (
            sandbox.execute("len(open('a.bin','rb').read())", files={"a.bin": b"\xff\0"}).value == 2
        )


def test_values_that_a_program_has_are_tokens_for_a_model() -> None:
    """With inputs="values" programs see everything, and a result is for the host; `for_model` is not."""
    code = (
        "import sys, os\nprint(mail)\nprint(mail, file=sys.stderr)\nopen('out.txt','w').write(mail)\n"
        "os.mkdir(mail)\nopen(mail + '/f', 'w').write('x')\n"
        "try: open('/' + mail)\nexcept OSError: pass\n"
        "raise ValueError(f'about {mail}')"
    )
    heard: list[bytes] = []
    with Sandbox(pool=0, privacy=Privacy(inputs="values")) as sandbox:
        result = sandbox.execute(
            code, inputs={"mail": MAIL}, collect=["*"], on_output=lambda _, data: heard.append(data)
        )
        value = sandbox.execute("{mail: [mail, 4111111111111111]}", inputs={"mail": MAIL})
    assert MAIL in result.stdout
    assert MAIL in str(result.error)
    shown = result.for_model()
    assert type(shown) is SandboxResult
    for name in ("stdout", "stderr", "error", "traceback", "files", "artifacts"):
        assert MAIL in str(getattr(result, name)), name
        assert "pii_email_" in str(getattr(shown, name)), name
    assert not SECRET.search(every_text(shown))
    assert not SECRET.search(b"".join(heard).decode())
    assert not SECRET.search(every_text(value.for_model()))
    assert sandbox.privacy is not None
    assert sandbox.privacy.reveal(shown.stdout) == result.stdout
    assert shown.execution_id == result.execution_id


def test_sessions_commands_and_background_processes() -> None:
    with (
        Sandbox(policy="standard", pool=0, privacy=Privacy(scope="session")) as sandbox,
        sandbox.session() as one, sandbox.session() as other,
    ):  # fmt: skip
        first = one.execute("x = mail\nx", inputs={"mail": MAIL}).value
        assert other.execute("mail", inputs={"mail": MAIL}).value != first
        one.upload("a.txt", f"to {MAIL}")
        assert one.download("a.txt").decode() == f"to {first}"
        ran = one.run(["cat", "-"], stdin=MAIL)
        assert ran.stdout == first
        assert one.run(["echo", MAIL]).stdout.strip() == first
        whole = one.run("printf 'ann%s' '@example.org'", shell=True)
        assert whole.stdout == MAIL
        assert whole.for_model().stdout.startswith("pii_email_")
        assert whole.for_model().stdout != first  # else a model could ask which value it is
        process = one.start_command(["cat"], env={"WHO": MAIL})
        assert process.write("x") == 1
        process.kill()


def test_the_trail_counts_and_holds_no_value(tmp_path: Any) -> None:
    path = tmp_path / "audit.jsonl"
    with (
        AuditLog(path=path) as audit,
        Sandbox(
            pool=0, tools=[find, send, fail], audit=audit, privacy=Privacy(**PRIVACY)
        ) as sandbox,
    ):
        sandbox.execute(
            "import tools\nfound = tools.find(name='pii_email_00000000')\n"
            "tools.send(to=found['mail'] + ' pii_email_00000000', body='')\n"
            "try: open('/' + 'ann@' + 'example.org')\nexcept OSError: pass\n"
            "tools.fail(to=found['mail'])"
        )
    text = path.read_text()
    assert not SECRET.search(text)
    for word in ('"restored":["email: 1"]', '"unknown_tokens":1', "card: 1", "name: 1"):
        assert word in text, word


def test_a_person_sees_values_and_the_model_and_the_file_do_not(tmp_path: Any) -> None:
    """`Runs` pauses at a risky call; the file of the runs has tokens."""
    SENT.clear()
    asked: list[Any] = []

    def approve(request: Any) -> bool:
        asked.append(request.arguments)
        return runs.ask(request)

    path = tmp_path / "runs"
    with (
        Runs(path) as runs,
        Sandbox(
            pool=0, tools=Broker([find, pay], approve=approve), privacy=Privacy(**PRIVACY)
        ) as sandbox,
    ):
        code = "import tools\ntools.pay(to=tools.find(name='')['mail'])"
        attempt = runs.start(sandbox, code)
        (waiting,) = runs.pending()
        assert asked == [{"to": MAIL}]
        assert waiting.arguments["to"].startswith("pii_email_")
        assert not SECRET.search(every_text(attempt.result))
        runs.approve(waiting.approval)
        done = runs.resume(sandbox, attempt.run)
        assert done.result.value == f"paid {waiting.arguments['to']}"
        assert SENT == [{"to": MAIL}]
        stored = b"".join(each.read_bytes() for each in tmp_path.iterdir())
        assert MAIL.encode() not in stored


def test_a_durable_run_in_a_branch_has_the_tokens_of_its_memory(tmp_path: Path) -> None:
    SENT.clear()
    privacy = Privacy(**PRIVACY, scope="session")
    with Runs(tmp_path / "runs") as runs:
        broker = Broker([find, pay], approve=runs.ask)
        with Sandbox(pool=0, tools=broker, privacy=privacy) as sandbox, sandbox.session() as source:
            token = source.execute("import tools\nmail = tools.find(name='')['mail']\nmail").value
            one, other = source.branch(2)
            with one, other:
                attempt = runs.start(one, "x = tools.pay(to=mail)\nx")
                (waiting,) = runs.pending()
                assert (waiting.arguments["to"], SENT) == (token, [])
                runs.approve(waiting.approval)
                # The other branch has the state with which the run began.
                done = runs.resume(other, attempt.run)
                assert done.result.value == f"paid {token}"
                assert SENT == [{"to": MAIL}]
                assert source.execute("mail").value == token
    stored = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert MAIL.encode() not in stored


def test_calls_of_the_host_see_values() -> None:
    broker = Broker([find, send])
    with Sandbox(pool=0, tools=broker, privacy=Privacy(**PRIVACY)):
        assert broker.call("find", {"name": ""})["mail"] == MAIL


def test_a_policy_asks_for_it_and_an_argument_cannot_loosen_it() -> None:
    policy = Policy(privacy=PrivacyRules(enabled=True, kinds=("email",), restore=("send:to",)))
    with Sandbox(policy=policy, pool=0, tools=[find]) as sandbox:
        assert "pii_email_" in str(sandbox.execute("import tools\ntools.find(name='')").value)
    with Sandbox(
        policy=policy, pool=0, privacy=Privacy(kinds=["card"], restore=["find:name"])
    ) as sandbox:
        assert sandbox.privacy is not None
        assert sandbox.privacy.rules.kinds == ("card", "email")
        assert sandbox.privacy.rules.restore == ()
    with pytest.raises(PolicyError, match="^privacy: must be a Privacy"):
        Sandbox(pool=0, privacy=True)  # type: ignore[arg-type]


def test_a_number_that_cannot_become_a_token_is_withheld() -> None:
    @tool
    def balance() -> int:
        """Tell."""
        return CARD

    with Sandbox(pool=0, tools=[balance], privacy=Privacy()) as sandbox:
        result = sandbox.execute("import tools\ntools.balance()")
    assert "the result was withheld" in str(result.error)
    assert not SECRET.search(every_text(result))


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    from cellwright.harness.schemas.spec import ToolSpec
    from cellwright.harness.tools.sanitizer import restored_of

    value: Any = "x"
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ToolArgumentsInvalid):
        restored_of(Privacy().scope(), ToolSpec(name="t"), {"a": value})


def test_without_privacy_a_result_is_for_everyone() -> None:
    with Sandbox(pool=0) as sandbox:
        result = sandbox.execute(f"{MAIL!r}")
    assert result.for_model() is result
    assert sandbox.privacy is None


@pytest.mark.parametrize("how", ["branch", "fork"])
def test_a_branch_uses_the_tokens_of_its_memory_and_no_later_ones(how: str) -> None:
    SENT.clear()
    privacy = Privacy(**PRIVACY, scope="session")
    with (
        Sandbox(pool=0, tools=[find, send], privacy=privacy) as sandbox,
        sandbox.session() as source,
    ):
        assert source.execute("import tools\nmail = tools.find(name='x')['mail']; mail").ok
        (branch,) = source.branch() if how == "branch" else (source.fork(),)
        with branch:
            assert branch.diverged == ()
            made = branch.execute("tools.send(to=mail, body=''); mail")
            assert SENT[-1]["to"] == MAIL
            later = source.execute("to", inputs={"to": "bob@example.org"}).value
            assert branch.execute("to", inputs={"to": "bob@example.org"}).value != later
            assert source.execute("mail").value == made.value
            assert branch.execute(f"tools.send(to={later!r}, body='')").ok
            assert SENT[-1]["to"] == later  # unknown to the branch


@pytest.mark.parametrize("scope", ["session", "vault"])
def test_a_resumed_session_uses_its_tokens_unless_they_were_forgotten(
    tmp_path: Path, scope: Any
) -> None:
    SENT.clear()
    privacy, pauses = Privacy(**PRIVACY, scope=scope), PauseSettings(tmp_path)
    with Sandbox(
        pool=0, tools=[find, send], privacy=privacy, host=HostSettings(pauses=pauses)
    ) as sandbox:
        session = sandbox.session()
        assert session.execute("import tools\nmail = tools.find(name='x')['mail']").ok
        token = session.pause()
        assert all(MAIL.encode() not in each.read_bytes() for each in tmp_path.iterdir())
        session = sandbox.resume(token)
        assert session.execute("tools.send(to=mail, body='')").ok
        assert SENT[-1]["to"] == MAIL
        stale = session.execute("mail").for_model().value
        token = session.pause()
        assert privacy.forget(session=session.id)
        with sandbox.resume(token) as resumed:
            assert resumed.execute("tools.send(to=mail, body='')").ok
            assert SENT[-1]["to"] == stale  # unknown, until a tool returns the value again
            assert resumed.execute("tools.find(name='x'); tools.send(to=mail, body='')").ok
            assert SENT[-1]["to"] == MAIL


def test_a_named_workspace_shows_tokens_and_keeps_what_no_program_changed(tmp_path: Path) -> None:
    SENT.clear()
    store = Workspaces(tmp_path)
    letter = f"Dear {NAME}, we write to {MAIL}.\n".encode()
    for path, content in (("letter.txt", letter), (f"{MAIL}.txt", b"own"), ("plain.txt", b"plain")):
        store.write("w", path, content)
    privacy = Privacy(**PRIVACY, names=[NAME])
    with Sandbox(pool=0, tools=[send], privacy=privacy, workspaces=store) as sandbox:
        code = "import os, tools\ntext = open('letter.txt').read()\nprint(text, sorted(os.listdir()))\n"
        result = sandbox.execute(code, workspace="w")
        assert result.workspace.state == "unchanged", result
        assert not SECRET.search(every_text(result))
        assert result.stdout.count("pii_email_") == 2
        with sandbox.session(workspace="w") as session:
            told = session.execute(
                code + "mail = text.split()[-1].strip('.')\ntools.send(to=mail, body='')\n"
                "open('answer.txt', 'w').write(mail)\nopen('plain.txt', 'a').write('!')"
            )
            assert told.ok, told.error
        assert SENT[-1]["to"] == MAIL
    kept = {name: store.read("w", name) for name in ("letter.txt", f"{MAIL}.txt", "plain.txt")}
    assert kept == {"letter.txt": letter, f"{MAIL}.txt": b"own", "plain.txt": b"plain!"}
    assert store.read("w", "answer.txt").startswith(b"pii_email_")
    store.write("w", "picture.png", b"\x89PNG\0")
    with (
        Sandbox(pool=0, privacy=privacy, workspaces=store) as sandbox,
        pytest.raises(PolicyError, match="picture.png.*no text"),
    ):
        sandbox.execute("1", workspace="w")
