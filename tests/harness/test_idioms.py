"""Idioms of notebooks and chats: a code fence is removed, other idioms are answered."""

from collections.abc import Iterator

import msgspec
import pytest

from cellwright import Policy, Sandbox, SandboxStatus
from cellwright.harness.sandbox.calls.idioms import notices_of, without_fence
from cellwright.policies.policy import Packages, Processes, Validation
from tests.conftest import policy_named
from tests.harness.test_cli import run
from tests.work import cost_of

FENCE = "```"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    packages = Packages(allow=("pandas", "numpy", "scikit_learn"))
    policy = msgspec.structs.replace(policy_named("strict"), packages=packages)
    with Sandbox(policy=policy, pool=0) as made:
        yield made


@pytest.mark.parametrize("word", ["", "python", "py", "Python3", "ipython", 'python title="x.py"'])
def test_a_program_is_taken_out_of_its_fence_with_a_notice(sandbox: Sandbox, word: str) -> None:
    code = f"\n  {FENCE}{word}\nx = 6\nx * 7\n{FENCE}\n\n"
    result = sandbox.execute(code)
    assert (result.value, result.error) == (42, None)
    (notice,) = result.notices
    assert notice.startswith("the program was taken out of its code fence: line 1 follows ```")
    assert result.to_dict()["notices"] == (notice,)
    assert sandbox.execute("6 * 7").notices == ()
    failed = sandbox.execute(f"{FENCE}{word}\n1\n1 / 0\n{FENCE}")
    assert 'File "<cell>", line 2' in (failed.traceback or "")
    assert len(failed.notices) == 1


def test_a_session_takes_a_program_out_of_its_fence_too(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.execute(f"{FENCE}\nx = 1\n{FENCE}").ok
        result = session.execute(f"{FENCE}python\nx\n{FENCE}")
        assert (result.value, len(result.notices)) == (1, 1)


@pytest.mark.parametrize(
    "code",
    [
        f"text = '''\n{FENCE}python\n1\n{FENCE}\n'''\ntext",
        f"'''{FENCE}\n{FENCE}'''",
        "5",
    ],
)
def test_a_program_that_is_valid_is_left_as_it_is(sandbox: Sandbox, code: str) -> None:
    result = sandbox.execute(code)
    assert (result.ok, result.notices) == (True, ())
    assert without_fence(code) == (code, "")


def test_a_fence_inside_a_program_stays() -> None:
    code = f"text = '''\n{FENCE}sh\nls\n{FENCE}\n'''"
    assert without_fence(f"{FENCE}{FENCE}\n{code}\n{FENCE}{FENCE}")[0] == f"{code}\n"
    assert without_fence(f"{FENCE}py\n{code}\n{FENCE}")[0] == f"{code}\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"{FENCE}bash\nls\n{FENCE}", "a code block of bash: pass its code with language='bash'"),
        (f"{FENCE}python\n1", "not one complete code block"),
        (f"{FENCE}python\n{FENCE}", "not one complete code block"),
        (f"{FENCE}\n", "not one complete code block"),
    ],
)
def test_another_fence_is_not_removed(sandbox: Sandbox, code: str, said: str) -> None:
    result = sandbox.execute(code)
    assert result.error == "SyntaxError: invalid syntax"
    (notice,) = result.notices
    assert said in notice


def test_other_languages_keep_their_backticks(sandbox: Sandbox) -> None:
    result = sandbox.execute(f"{FENCE}:{FENCE}", "bash")
    assert result.notices == ()


STRICT = Policy(name="strict", packages=Packages(allow=("pandas", "Scikit_Learn")))
SUBPROCESSES = Policy(processes=Processes(subprocesses=True))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("!git status", "!git status: a program has no shell: use subprocess.run([...])"),
        ("files = !ls *.csv", "!ls *.csv: a program has no shell: use os.listdir(), or subproc"),
        ("!ls", "under a policy that allows subprocesses, such as standard"),
        ("%cd data", "%cd data: use os.chdir(...)"),
        ("  %matplotlib inline", "leave the line out: figures that are open"),
        ("%%bash", "%%bash: pass the other lines as a program with language='bash'"),
        ("%%writefile a.txt", "open(..., 'w')"),
        ("%who_ls", "programs have no commands of IPython: leave the line out"),
        ("?print", "?print: use help(print)"),
        ("json.dumps??", "use help(json.dumps)"),
        ("%pip install pandas", "pass packages=['pandas'] to Sandbox (--packages pandas)"),
        ("!pip install -q 'pandas>=2' scikit-learn",
         "pass packages=['pandas>=2', 'scikit-learn'] to Sandbox (--packages 'pandas>=2' --packages"),
        ("!python -m pip install pandas requests",
         "(--packages pandas); packages.allow of the policy lacks requests, it has pandas, Scikit_Learn"),
        ("pip install requests", "nothing: packages.allow of the policy lacks requests"),
        ("%conda install -y pandas", "packages=['pandas']"),
        ("!uv pip install pandas", "packages=['pandas']"),
        ("%pip install -r requirements.txt", "packages=Path(...)"),
        ("%pip install", "packages=[...]"),
        ("%pip install 'pandas", "packages=[...]"),
        ("%pip install $(evil) `x`", "packages=[...]"),
    ],
)  # fmt: skip
def test_an_idiom_is_answered_with_what_to_use_instead(line: str, said: str) -> None:
    (notice,) = notices_of(f"x = 1\n{line}\n", STRICT)
    assert notice.startswith("line 2: ")
    assert said in notice


def test_the_answer_depends_on_the_policy() -> None:
    assert "policy" not in notices_of("!make", SUBPROCESSES)[0]
    assert "requests" in notices_of("%pip install requests", SUBPROCESSES)[0]
    there = Policy(packages=Packages(require=("pandas==2.*",)))
    assert "can be imported" in notices_of("%pip install Pandas", there)[0]


def test_answers_come_with_a_syntax_error_and_only_then(sandbox: Sandbox) -> None:
    result = sandbox.execute("%pip install pandas requests\nimport pandas")
    assert result.error == "SyntaxError: invalid syntax"
    (notice,) = result.notices
    assert "packages=['pandas']" in notice
    assert "lacks requests" in notice
    assert sandbox.execute("'''\n!ls\n'''").notices == ()
    assert sandbox.execute("x = (7\n% 2)\nx").value == 1
    assert sandbox.execute("def f(:\n    pass").notices == ()


def test_a_program_that_source_checks_reject_is_answered_too() -> None:
    policy = msgspec.structs.replace(policy_named("strict"), validation=Validation(mode="enforce"))
    with Sandbox(policy=policy, pool=0) as sandbox:
        result = sandbox.execute("!ls")
        assert result.status is SandboxStatus.REJECTED
        assert len(result.notices) == 1
        assert sandbox.execute(f"{FENCE}\n1 + 1\n{FENCE}").value == 2


def test_a_long_program_costs_the_host_little() -> None:
    for piece in ("!" * 80 + "\n", " ", "a ", "%pip install '", "?", "a.", "=", "\n"):
        code = piece * (4_000_000 // len(piece))
        cost = cost_of(lambda code=code: notices_of(code, STRICT))  # type: ignore[misc]
        assert cost.memory_bytes < 16 << 20
        assert all(len(each) < 500 for each in notices_of(code, STRICT))
        assert len(notices_of(code, STRICT)) <= 5


def test_the_command_prints_the_notice() -> None:
    done = run("-c", f"{FENCE}python\nprint(1)\n{FENCE}")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("cellwright: the program was taken out of its code fence")
    done = run("-c", "!\x1b[2Jls")
    assert done.returncode == 1
    assert "cellwright: line 1: !\\x1b[2Jls: a program has no shell" in done.stderr
