"""The parser of Dockerfiles, by cases of the Dockerfile reference and of BuildKit's rules."""

import pytest

from cellwright.harness.sandbox.building.build_config import configured
from cellwright.harness.sandbox.building.dockerfile import Dockerfile, parse
from cellwright.harness.sandbox.building.dockerfile_words import LineError, expand, split_words
from cellwright.harness.sandbox.building.ignore_rules import IgnoreRules
from cellwright.harness.sandbox.images.image import ImageConfig

VARIABLES = {"foo": "/bar", "empty": "", "abc": "hello", "n": "7"}


def words_of(text: str) -> list[tuple[str, ...]]:
    return [each.words for each in parse(f"FROM x\n{text}\n").stages[0].instructions]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RUN echo 'some # of things'", [("echo 'some # of things'",)]),
        ("RUN echo hello \\\n# comment\nworld", [("echo hello world",)]),
        ("  # comment\n   run echo hello", [("echo hello",)]),
        ('RUN echo "\\\n     hello\\\n     world"', [('echo "     hello     world"',)]),
        ("RUN a \\  \n\n\n  && b", [("a   && b",)]),
        ("RUN a \\", [("a",)]),
        ("RUN\techo\thi", [("echo\thi",)]),
        ('RUN ["echo", "$HOME"]', [("echo", "$HOME")]),
        ('RUN [ "sh", "-c", "a b" ]', [("sh", "-c", "a b")]),
        ("RUN [ -f /etc/passwd ] && true", [("[ -f /etc/passwd ] && true",)]),
        ("RUN ['a']", [("['a']",)]),
        ('CMD ["c:\\windows"]', [('["c:\\windows"]',)]),
        ('COPY ["a b", "c"]', [("a b", "c")]),
        ("COPY a  b\tc/", [("a", "b", "c/")]),
        ("ENV a=1 b='x y' c=\"z\\\"\" d=q\\ r", [("a", "1", "b", "'x y'", "c", '"z\\""', "d", "q\\ r")]),
        ("ENV one two three", [("one", "two three")]),
        ("ENV ONE TWO= THREE=world", [("ONE", "TWO= THREE=world")]),
        ("LABEL com.example.x=\"a\" y=", [("com.example.x", '"a"', "y", "")]),
        ("ARG a b=2", [("a", "b=2")]),
        ("RUN echo $((1 << 2)) <<<x", [("echo $((1 << 2)) <<<x",)]),
        ("WORKDIR /a b", [("/a b",)]),
        ("\r\nRUN a\r\nRUN b\r", [("a",), ("b",)]),
    ],
)  # fmt: skip
def test_instructions_have_the_words_that_docker_gives_them(
    text: str, words: list[tuple[str, ...]]
) -> None:
    assert words_of(text) == words


def test_here_documents_end_at_their_names() -> None:
    text = (
        "FROM x\nRUN <<EOF\necho a\n# kept\nEOF\nRUN cat <<-'ONE' - <<TWO > /x\n\ta\n\tONE\nb\nTWO\n"
        'COPY <<a.txt <<"b.txt" /d/\n$foo\na.txt\n$foo\nb.txt\nUSER me\n'
    )
    first, second, copy, user = parse(text).stages[0].instructions
    assert [each.content for each in first.heredocs] == ["echo a\n# kept\n"]
    assert second.words == ("cat <<-'ONE' - <<TWO > /x",)
    assert [(each.name, each.content) for each in second.heredocs] == [
        ("ONE", "a\n"),
        ("TWO", "b\n"),
    ]
    assert [(each.name, each.expands) for each in copy.heredocs] == [
        ("a.txt", True),
        ("b.txt", False),
    ]
    assert user.line == 16


@pytest.mark.parametrize(
    ("head", "escape"),
    [
        ("# escape=`", "`"), ("#escape = \\", "\\"), ("# EsCaPe=`\n# syntax=docker/dockerfile:1", "`"),
        ("# check=skip=all\n# escape=`", "`"), ("# about\n# escape=`", "\\"), ("\n# escape=`", "\\"),
        ("# unknown=x\n# escape=`", "\\"), ("\ufeff# escape=`", "`"),
        ("# syntax=docker/dockerfile:1.7-labs", "\\"),
    ],
)  # fmt: skip
def test_directives_count_above_everything_else(head: str, escape: str) -> None:
    assert parse(f"{head}\nFROM x\n").escape == escape


def test_the_escape_character_continues_lines() -> None:
    (stage,) = parse("# escape=`\nFROM x\nRUN dir c:\\\nRUN a `\n b\n").stages
    assert [each.words for each in stage.instructions] == [("dir c:\\",), ("a  b",)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no instructions"),
        ("# only a comment\n", 1, "no instructions"),
        ("RUN a\n", 1, "before the first FROM"),
        ("ARG a\n", 1, "no FROM"),
        ("FROM x\n\nFRON y\n", 3, "'FRON' is not supported"),
        ("FROM x\nHEALTHCHECK CMD true\n", 2, "'HEALTHCHECK' is not supported"),
        ("FROM x\nONBUILD RUN a\n", 2, "'ONBUILD' is not supported"),
        ("FROM x\nRUN --mount=type=cache,target=/c a\n", 2, "RUN --mount is not supported"),
        ("FROM x\nRUN a \\\n b\nRUN --security=insecure a\n", 4, "--security"),
        ("FROM x\nCOPY --parents a b/\n", 2, "COPY --parents is not supported"),
        ("FROM x\nCOPY a\n", 2, "needs a source and a destination"),
        ("FROM x\nCOPY a b c\n", 2, "must end with /"),
        ("FROM x\nADD https://example.org/a /a\n", 2, "is not a local file"),
        ("FROM x\nADD git@example.org:a.git /a\n", 2, "is not a local file"),
        ("FROM x\nENV\n", 2, "ENV needs an argument"),
        ("FROM x\nENV a\n", 2, "has no value"),
        ("FROM x\nENV a=1 b\n", 2, "must be NAME=VALUE"),
        ("FROM x\nSHELL /bin/bash\n", 2, "SHELL needs a JSON array"),
        ("FROM x\nRUN [1]\n", 2, "array of texts"),
        ("FROM x\nRUN <<EOF\na\n", 2, "EOF has no end"),
        ("FROM x y\n", 1, "FROM IMAGE"),
        ("FROM x AS 1a\n", 1, "invalid name of a stage"),
        ("FROM x AS a\nFROM y AS A\n", 2, "is there already"),
        ("# escape=x\nFROM x\n", 1, "escape: must be"),
        ("# syntax=docker/dockerfile:1\n# syntax=docker/dockerfile:1\nFROM x\n", 2, "twice"),
        ("# syntax=example.org/frontend\nFROM x\n", 1, "unknown frontend"),
        ("FROM x\nCOPY --from=a --from=b c d\n", 2, "given twice"),
        ("FROM x\n" + "USER a\n" * 1001, 1001, "more than 1000"),
        ("FROM x\nRUN " + "a" * (1 << 20), 1, "larger than"),
    ],
)  # fmt: skip
def test_an_invalid_line_is_an_error_at_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(LineError) as raised:
        parse(text)
    assert raised.value.number == line
    assert words in raised.value.what


def test_stages_have_names_and_platforms() -> None:
    found: Dockerfile = parse(
        "ARG V=1\nFROM --platform=$BUILDPLATFORM a:$V AS One\nRUN x\nFROM one\nUSER b\nFROM scratch\n"
    )
    assert [(each.base, each.name, len(each.instructions)) for each in found.stages] == [
        ("a:$V", "one", 1), ("one", "", 1), ("scratch", "", 0),
    ]  # fmt: skip
    assert found.stages[0].platform == "$BUILDPLATFORM"
    assert [each.words for each in found.arguments] == [("V=1",)]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$foo", "/bar"), ("${foo}_x", "/bar_x"), ("\\$foo", "$foo"), ("\\${foo}", "${foo}"),
        ("'$foo'", "$foo"), ('"$foo"', "/bar"), ('"\\$foo \\" \\n"', '$foo " \\n'), ("a\\ b", "a b"),
        ("$none", ""), ("$none-x", "-x"), ("${none:-w}", "w"), ("${empty:-w}", "w"), ("${empty-w}", ""),
        ("${none-w}", "w"), ("${foo:-w}", "/bar"), ("${foo:+w}", "w"), ("${empty:+w}", ""),
        ("${empty+w}", "w"), ("${none:+w}", ""), ("${none:-${abc}x}", "hellox"), ("${none:-'a}'}", "a}"),
        ("${foo:?no}", "/bar"), ("$", "$"), ("a$", "a$"), ("$ a", "$ a"), ("$1", ""), ("$n$n", "77"),
        ("'a'\"b\"c", "abc"), ("a\\", "a"), ("\\\\", "\\"), ("$foo.txt", "/bar.txt"), ("", ""),
    ],
)  # fmt: skip
def test_variables_are_replaced_as_docker_does(text: str, result: str) -> None:
    assert expand(text, VARIABLES, "\\") == result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${", "bad substitution"), ("${}", "bad substitution"), ("${foo", "bad substitution"),
        ("${foo:-a", "closing }"), ("'a", "closing '"), ('"a', 'closing "'), ("${foo#b}", "unknown"),
        ("${none:?is needed}", "none: is needed"), ("${none?}", "must be set"),
        ("${a:-" * 30 + "}" * 30, "within each other"),
    ],
)  # fmt: skip
def test_invalid_substitutions_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand(text, VARIABLES, "\\")


def test_a_result_is_bounded() -> None:
    value = "a" * 1000
    for _ in range(10):
        value = expand("$a$a", {"a": value}, "\\")
    with pytest.raises(ValueError, match="longer than"):
        expand("$a$a", {"a": value}, "\\")


def test_a_here_document_keeps_quotes() -> None:
    assert expand("'$foo' \"x\" \\$foo", VARIABLES, "\\", keeps_quotes=True) == "'/bar' \"x\" $foo"


def test_words_are_split_outside_quotes() -> None:
    assert split_words("a 'b c' \"d \\\" e\" f\\ g  ''", "\\") == (
        "a", "'b c'", '"d \\" e"', "f\\ g", "''",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("ENV a=1 b=$abc", "env", ("PATH=/bin", "a=1", "b=hello")),
        ("ENV PATH=$PATH:/x", "env", ("PATH=/bin:/x",)),
        ("EXPOSE 80 53/udp 8000-8001", "exposed_ports", ("80/tcp", "53/udp", "8000/tcp", "8001/tcp")),
        ("CMD echo $HOME", "cmd", ("/bin/sh", "-c", "echo $HOME")),
        ('ENTRYPOINT ["a", "$b"]', "entrypoint", ("a", "$b")),
        ("LABEL a=\"x y\" \"b c\"='d'", "labels", {"a": "x y", "b c": "d"}),
        ("VOLUME /a $foo", "volumes", ("/a", "/bar")),
        ('VOLUME ["/a b"]', "volumes", ("/a b",)),
        ("USER ${abc}:x", "user", "hello:x"),
        ("STOPSIGNAL SIGTERM", "stop_signal", "SIGTERM"),
        ('SHELL ["/bin/bash", "-ec"]', "shell", ("/bin/bash", "-ec")),
        ("MAINTAINER me <me@example.org>", "labels", {"maintainer": "me <me@example.org>"}),
    ],
)  # fmt: skip
def test_an_instruction_changes_one_field_of_the_configuration(
    text: str, field: str, value: object
) -> None:
    (given,) = parse(f"FROM x\n{text}\n").stages[0].instructions
    variables = {**VARIABLES, "PATH": "/bin"}
    changed = configured(
        ImageConfig(env=("PATH=/bin",)), given, lambda text: expand(text, variables, "\\")
    )
    assert getattr(changed, field) == value


@pytest.mark.parametrize("port", ["0", "70000", "x", "80/icmp", "90-80"])
def test_an_invalid_port_is_refused(port: str) -> None:
    (given,) = parse(f"FROM x\nEXPOSE {port}\n").stages[0].instructions
    with pytest.raises(ValueError, match="EXPOSE"):
        configured(ImageConfig(), given, str)


@pytest.mark.parametrize(
    ("rules", "left_out", "kept"),
    [
        ("*.pyc", ["a.pyc"], ["d/a.pyc", "a.py"]),
        ("**/*.pyc", ["a.pyc", "d/e/a.pyc"], ["a.py"]),
        ("/node_modules", ["node_modules", "node_modules/x/y"], ["a/node_modules"]),
        ("*/temp*", ["a/temp", "a/temp1/x"], ["temp", "a/b/temp"]),
        ("temp?", ["tempa"], ["temp", "tempab"]),
        ("*.md\n!README.md", ["a.md"], ["README.md"]),
        ("*.md\n!README*.md\nREADME-x.md", ["a.md", "README-x.md"], ["README.md"]),
        ("*\n!src", ["a", "b/c"], ["src", "src/x/y"]),
        ("# a\n\n  b  ", ["b"], ["a", "# a"]),
        ("a/**/z", ["a/z", "a/b/c/z"], ["z"]),
        ("a[0-9]", ["a1"], ["ab"]), ("a[^0-9]", ["ab"], ["a1"]), ("a\\*", ["a*"], ["ab"]),
        ("./x/../y", ["y"], ["x"]),
    ],
)  # fmt: skip
def test_a_dockerignore_leaves_out_what_docker_does(
    rules: str, left_out: list[str], kept: list[str]
) -> None:
    found = IgnoreRules(rules)
    assert [each for each in (*left_out, *kept) if found.leaves_out(each)] == left_out
