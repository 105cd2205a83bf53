"""Stubs in cells: every one calls what it is of, and nobody but the host changes them."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import AuditLog, Broker, PolicyError, Sandbox
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.stubs import python_stubs, stub_tree
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.policies.tool_rules import ToolRule, Tools
from cellwright.testing import inspect
from tests.conftest import policy_named
from tests.harness.stubs.catalogue import catalogue
from tests.harness.stubs.samples import sample_of
from tests.harness.stubs.test_hostile import HOSTILE, everywhere


def echo(spec: ToolSpec) -> Tool:
    """Return a tool that says what it was called with."""
    spec = replace(spec, output_schema=None, owner=ToolOwner.DEVELOPER)
    return Tool(spec, lambda arguments, _: [spec.name, arguments])


def plain(name: str, **about: Any) -> ToolSpec:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return ToolSpec(name=name, owner=ToolOwner.DEVELOPER, **({"parameters": parameters} | about))


class Changing:
    """A catalogue whose tools come and go."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self._known: dict[str, Tool] = {}

    def get(self, name: str) -> Tool:
        return self._known.setdefault(name, echo(plain(name)))

    def specs(self) -> Iterable[ToolSpec]:
        return [self.get(name).spec for name in self.names]


def sandbox_of(specs: Iterable[ToolSpec], **about: Any) -> Sandbox:
    policy = about.pop("policy", None) or policy_named("strict")
    return Sandbox(policy=policy, tools=[echo(spec) for spec in specs], pool=0, **about)


@pytest.fixture
def few() -> Iterator[Sandbox]:
    with sandbox_of([plain("maths.double"), plain("send")]) as sandbox:
        yield sandbox


def calls_of(
    specs: Iterable[ToolSpec],
) -> list[tuple[ToolSpec, str, dict[str, Any], dict[str, Any]]]:
    """Return for each tool where its stub is, arguments by Python's names, and by their own."""
    specs = list(specs)
    places = stub_tree.paths(specs)
    made = []
    for spec in specs:
        wire = sample_of(spec)
        if wire is None:
            continue
        positional, others = python_stubs.parameters_of(stub_tree.described(spec))
        said = {
            each.name: wire[each.field.wire]
            for each in (*positional, *others)
            if each.field.wire in wire
        }
        made.append((spec, places[spec.name], said, wire))
    return made


_CALL_ALL = """
import importlib
wrong = []
for place, said, name, wire in calls:
    module = importlib.import_module('tools.' + place)
    function = getattr(module, place.rpartition('.')[2])
    got = function(**said)
    if got != [name, wire]:
        wrong.append([place, got])
wrong
"""
_CALL_ALL_IN_NODE = """
(async () => {
  const wrong = [];
  for (const [place, name, wire] of calls) {
    const word = place.split('.').pop();
    const got = (await import('/tools/' + place.replaceAll('.', '/') + '.mjs'))[word](wire);
    if (JSON.stringify(got) !== JSON.stringify([name, wire])) wrong.push([place, got]);
  }
  return wrong;
})()
"""


@pytest.mark.needs("shared")
def test_every_tool_of_the_catalogue_is_called_by_its_wire_names() -> None:
    calls = calls_of(catalogue())
    assert len(calls) >= len(catalogue()) * 0.98
    inputs = [(place, said, spec.name, wire) for spec, place, said, wire in calls]
    with sandbox_of(catalogue()) as sandbox:
        result = sandbox.execute(_CALL_ALL, inputs={"calls": inputs})
    assert result.value == []
    assert result.violations == ()


@pytest.mark.needs("shared", "node")
def test_every_tool_of_the_catalogue_is_called_from_node() -> None:
    places = stub_tree.paths(catalogue(), "typescript")
    calls = [(places[spec.name], spec.name, wire) for spec, _, _, wire in calls_of(catalogue())]
    with sandbox_of(catalogue()) as sandbox:
        result = sandbox.execute(_CALL_ALL_IN_NODE, "javascript", inputs={"calls": calls})
    assert (result.value, result.error) == ([], None)


@pytest.mark.needs("node")
def test_no_tool_stands_in_the_place_of_an_index() -> None:
    """Whoever may make a tool would take all others from programs in Node."""
    names = ["index", "maths.index", "maths.double", "index.more"]
    code = """
    (async () => {
      const { tools } = await import('/tools/index.mjs');
      const maths = await import('/tools/maths/index.mjs');
      return [typeof tools, Object.keys(maths), maths.double(), maths.index_()];
    })()
    """
    with sandbox_of(map(plain, names)) as sandbox:
        result = sandbox.execute(code, "javascript")
    assert result.error is None
    assert result.value[1:] == [["double", "index_"], ["maths.double", {}], ["maths.index", {}]]


_MARK = "/workspace/executed"
_PAYLOADS = [
    f'"""\nopen("{_MARK}", "w")\n"""', f"'''\nopen('{_MARK}', 'w')\n'''", f'\\"""\nopen("{_MARK}", "w")',
    f'"; open("{_MARK}", "w"); "', f"'); open('{_MARK}', 'w'); ('", f"x): open('{_MARK}', 'w') #",
    f"*/ require('fs').writeFileSync('{_MARK}', ''); /*", f'`${{require("fs").writeFileSync("{_MARK}", "")}}`',
    f'"); process.binding("fs").writeFileSync("{_MARK}"); ("', f"\u2028require('fs').writeFileSync('{_MARK}', '')",
    f"__import__('os').mknod('{_MARK}')", f"{{open('{_MARK}', 'w')}}", f"\r\nopen('{_MARK}', 'w')",
]  # fmt: skip


@pytest.mark.parametrize(
    "language", ["python", pytest.param("javascript", marks=pytest.mark.needs("node"))]
)
def test_no_text_of_a_schema_is_executed(language: str) -> None:
    """What the host makes of such schemas is not asked: a call may be refused, but is nothing else."""
    specs = [everywhere(text) for text in (*_PAYLOADS, *HOSTILE)]
    specs += [replace(spec, name=f"s{n}.{spec.name[:40]}") for n, spec in enumerate(specs)]
    specs = [spec for spec in specs if "\ud800" not in spec.name]  # a name that no message can hold
    places = stub_tree.paths(specs, "python" if language == "python" else "typescript")
    inputs = list(places.values())
    program = _IMPORT_ALL if language == "python" else _IMPORT_ALL_IN_NODE
    with sandbox_of(specs) as sandbox:
        result = sandbox.execute(program, language, inputs={"places": inputs, "mark": _MARK})
    assert (result.error, result.value) == (None, [len(inputs), False])
    assert len(inputs) > 150


_IMPORT_ALL = """
import importlib, os, tools
called = 0
for place in places:
    function = getattr(importlib.import_module('tools.' + place), place.rpartition('.')[2])
    try:
        function(x={})
    except tools.ToolError:
        pass
    called += 1
[called, os.path.exists(mark)]
"""
_IMPORT_ALL_IN_NODE = """
(async () => {
  let called = 0;
  for (const place of places) {
    const word = place.split('.').pop();
    const module = await import('/tools/' + place.replaceAll('.', '/') + '.mjs');
    try { module[word]({x: {}}); } catch (error) { if (!error.kind) throw error; }
    called++;
  }
  return [called, require('fs').existsSync(mark)];
})()
"""


IMPORTS = [
    "from tools.maths import double\ndouble(2)", "from tools.maths import double\ndouble(n=2)",
    "import tools.maths.double\ntools.maths.double(2)", "import tools\ntools.maths.double(2)",
    "from tools import maths\nmaths.double(2)", "import tools.maths.double as d\nd(2)",
    "from tools.maths.double import double\ndouble(2)",
    "import asyncio\nfrom tools.maths import double\nasync def main(): return await double(2)\nasyncio.run(main())",
]  # fmt: skip


@pytest.mark.parametrize("many", [0, 100])
@pytest.mark.parametrize("program", IMPORTS)
def test_a_tool_is_the_same_function_however_it_is_imported(
    program: str, many: int, sandboxes: dict[int, Sandbox]
) -> None:
    result = sandboxes[many].execute(program)
    assert (result.value, result.error) == (["maths.double", {"n": 2}], None)


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[dict[int, Sandbox]]:
    made = {
        many: sandbox_of([plain("maths.double"), *(plain(f"other.tool{n}") for n in range(many))])
        for many in (0, 100)
    }  # fmt: skip
    yield made
    for sandbox in made.values():
        sandbox.close()


def test_what_is_there_can_be_listed_and_read(sandboxes: dict[int, Sandbox]) -> None:
    result = sandboxes[100].execute(
        "import os\nfrom tools import maths, other\n"
        "[sorted(os.listdir('/tools')), sorted(os.listdir('/tools/maths')), dir(maths), len(dir(other)),"
        " open('/tools/maths/__init__.py').read()[:20]]"
    )
    assert result.value == [
        ["__init__.pyi", "maths", "other"], ["__init__.py", "double.py"], ["double"], 100,
        '"""maths: 1 tool.\n\nd',
    ]  # fmt: skip


def test_programs_cannot_change_the_stub_files(few: Sandbox) -> None:
    attempts = [
        "open('/tools/new', 'w')", "open('/tools/send.py', 'a')", "os.unlink('/tools/send.py')",
        "os.mkdir('/tools/x')", "os.rename('/tools/send.py', '/tools/y')", "os.rmdir('/tools/maths')",
        "os.symlink('/etc', '/tools/etc')", "os.chmod('/tools/send.py', 0o777)", "os.utime('/tools/send.py')",
    ]  # fmt: skip
    program = "import os\nsaid = []\n" + "".join(
        f"try: {attempt}; said.append('done')\nexcept OSError as error: said.append(error.strerror)\n"
        for attempt in attempts
    )
    program += "[said, bool(os.statvfs('/tools').f_flag & os.ST_RDONLY)]"
    said, read_only = few.execute(program).value
    assert read_only
    assert set(said) <= {"Read-only file system", "Operation not permitted", "Permission denied"}
    assert said[0] == "Read-only file system"  # Landlock, by itself, would say Permission denied


def test_a_sandbox_sees_its_own_tools_only_and_one_without_none(few: Sandbox) -> None:
    listed = "import os\nsorted(os.listdir('/tools')) if os.path.exists('/tools') else None"
    with (
        sandbox_of([plain("secret.thing")]) as other,
        Sandbox(policy=policy_named("strict"), pool=0) as bare,
    ):
        assert few.execute(listed).value == ["__init__.pyi", "maths", "send.py"]
        assert other.execute(listed).value == ["__init__.pyi", "secret"]
        assert bare.execute(listed).value is None


def test_tools_come_and_go_while_a_session_lives() -> None:
    catalogue = Changing("maths.double")
    broker, policy = Broker(catalogue), policy_named("strict")
    with Sandbox(policy=policy, tools=broker, pool=0) as sandbox, sandbox.session() as session:
        assert session.execute("import tools\ntools.maths.double(1)").ok
        assert not session.execute("import tools.maths.triple").ok
        catalogue.names = ["maths.triple", "later"]
        assert session.execute("from tools.maths import triple\ntriple(1)").value == [
            "maths.triple",
            {"n": 1},
        ]
        assert session.execute("tools.later(2)").value == ["later", {"n": 2}]
        assert session.execute("import os; sorted(os.listdir('/tools/maths'))").value == [
            "__init__.py", "triple.py",
        ]  # fmt: skip


def test_a_policy_cannot_show_something_else_where_stubs_are(tmp_path: Any) -> None:
    policy = policy_named("strict")
    policy = replace(policy, filesystem=replace(policy.filesystem, read=("/tools/x",)))
    with pytest.raises(PolicyError, match="/tools"):
        sandbox_of([plain("send")], policy=policy)


def test_nothing_is_left_of_what_was_laid_out() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with sandbox_of([plain("maths.double")]) as sandbox:
        assert sandbox.execute("import tools.maths").ok
        assert " /tools " not in Path("/proc/self/mounts").read_text()
    assert sorted(os.listdir("/proc/self/fd")) == before


# finding


@pytest.fixture
def trail() -> AuditLog:
    return AuditLog(max_entries=1000)


def test_tools_are_found_from_inside_and_the_trail_says_so(trail: AuditLog) -> None:
    specs = [
        plain("mail.send", description="Send a mail. To somebody."),
        plain("maths.double", description="Double."),
    ]
    broker = Broker(_offer(specs), audit=trail)
    with Sandbox(policy=policy_named("strict"), tools=broker, pool=0, audit=trail) as sandbox:
        result = sandbox.execute(
            "from tools import search_tools, browse, describe\n"
            "[search_tools('send a mail', detail='name')['tools'], search_tools('send a mail')['tools'],"
            " search_tools('send a mail', detail='full')['tools'], search_tools('send', server='maths')['tools'],"
            " browse()['servers'], browse('mail')['tools'], describe('mail.send', detail='summary'),"
            " search_tools('convert currency')]"
        )
    line = "mail.send(n: int=...) -> Any  # Send a mail."
    name, summary, full, other, servers, browsed, described, nothing = result.value
    assert (name, summary, other) == (["mail.send"], [line], [])
    assert (servers, browsed, described) == (
        {"mail": 1, "maths": 1},
        ["mail.send: Send a mail."],
        line,
    )
    assert full[0].startswith("from tools.mail import send\n\ndef send(n: int=UNSET)")
    assert nothing["tools"] == []
    assert nothing["hint"]
    assert [e.target for e in trail.get_entries() if e.action == "call"].count("tools.search") == 5


def test_what_the_rules_forbid_is_neither_found_nor_laid_out() -> None:
    rules = Tools(
        rules=(
            ToolRule("mail.*", "deny"),
            ToolRule("file.*", "deny", {"path": "/etc/*"}),
            ToolRule("*", "allow"),
        )
    )
    specs = [plain("mail.send", description="Send."), plain("file.send", description="Send.")]
    with sandbox_of(specs, policy=replace(policy_named("strict"), tools=rules)) as sandbox:
        result = sandbox.execute(
            "import os, tools\n"
            "said = []\n"
            "try: tools.describe('mail.send')\nexcept tools.ToolError as error: said.append(error.kind)\n"
            "[tools.search_tools('send', detail='name')['tools'], tools.browse()['servers'],"
            " sorted(os.listdir('/tools')), said]"
        )
    assert result.value == [["file.send"], {"file": 1}, ["__init__.pyi", "file"], ["not_found"]]


def test_a_caller_finds_only_the_tools_that_it_may_call() -> None:
    specs = [plain("mail.send", description="Send."), plain("file.send", description="Send.")]
    broker = Broker(_offer(specs))
    caller = Caller(id="narrow", tools=frozenset(["file.send"]))
    assert broker.call("tools.search", {"query": "send", "detail": "name"}, caller)["tools"] == [
        "file.send"
    ]
    assert broker.call("tools.browse", {}, caller)["servers"] == {"file": 1}
    everyone = broker.call("tools.search", {"query": "send", "detail": "name"})["tools"]
    assert sorted(everyone) == ["file.send", "mail.send"]


def test_looking_for_tools_counts_as_calls() -> None:
    rules = Tools(calls=2)
    with sandbox_of(
        [plain("send")], policy=replace(policy_named("strict"), tools=rules)
    ) as sandbox:
        result = sandbox.execute("from tools import browse\nfor _ in range(3): browse()")
    assert (
        result.error == "tools.ToolError: 2 calls of tools were made, as many as the policy allows"
    )


def _offer(specs: Iterable[ToolSpec]) -> Any:
    from cellwright.harness.tools.broker import Offer

    return Offer([echo(spec) for spec in specs])


def test_a_program_that_waits_for_a_person_calls_by_its_own_lines(few: Sandbox) -> None:
    """A call is known by its place: through a stub it stands where the program calls the stub."""
    seen: list[str] = []
    sandbox_tools: Any = inspect(few).sandbox_tools
    answer, prepare = sandbox_tools.answer, sandbox_tools.prepare
    sandbox_tools.answer = lambda caller, call, tell: (
        seen.append(call.site),
        answer(caller, call, tell),
    )[1]
    program = "import tools.maths.double\n\ntools.maths.double(1)"
    assert few.execute(program).ok
    assert seen.pop() == ""  # no run records its calls: to find out a site takes time
    sandbox_tools.prepare = lambda *given: replace(prepare(*given), sites=True)
    assert few.execute(program).ok
    assert json.dumps(seen).count(":3") == 1
