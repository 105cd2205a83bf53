"""One index over all that can be called: named first, best next, and nothing where nothing answers."""

import random
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.benchmarks.catalogues import questions
from cellwright.harness.search import postings as postings_module
from cellwright.harness.search.documents import Document, document_of
from cellwright.harness.search.postings import FIELDS, Postings, words
from cellwright.harness.search.search import MAX_FOUND, Filter, SearchIndex, SearchPage, fuse
from tests.conftest import SHARED


def tool(name: str, description: str = "", server: str = "", **more: object) -> Document:
    id = f"{server}/{name}" if server else name
    return Document(id=id, name=name, description=description, server=server, **more)  # type: ignore[arg-type]


QUERY = {"properties": {"query": {"description": "SELECT SQL query to execute"}}}
CATALOGUE = (
    document_of(
        "sqlite/read_query", "read_query", "Execute a SELECT query on the SQLite database", QUERY,
        server="sqlite", kind="mcp",
    ),
    tool("list_tables", "List all tables in the SQLite database", "sqlite", kind="mcp"),
    tool("find_symbol", "Look up where code is defined", "serena", kind="mcp"),
    tool("find_file", "Find files by a pattern, and the symbols in them", "serena", kind="mcp"),
    tool("find_referencing_symbols", "Find code that uses a symbol", "serena", kind="mcp"),
    tool("list-mail-messages", "List the messages of the signed-in user", "mail", kind="mcp"),
    tool("list-mail-folder-messages", "List the mail messages in a mail folder", "mail", kind="mcp"),
    tool("send-mail", "Send a mail", "mail", kind="mcp"),
    tool("convert_time", "Convert a time between time zones", "time", kind="mcp"),
    tool("run_pipeline", "Run a pipeline", "ci", kind="mcp"),
    tool("run_tests", "Run the tests", "ci", kind="mcp"),
    tool("create_issue", "Create an issue in a GitHub repository", "github", kind="mcp"),
    tool("slugify", "Make a slug of a title", state="trusted", kind="made", tags=("text",)),
    tool("word_count", "Count the words of a text", state="draft", kind="made", tags=("text",)),
    tool("pdf", "Fill in, merge and split PDF forms", kind="skill", tags=("text", "office")),
)  # fmt: skip


@pytest.fixture
def index() -> SearchIndex:
    return SearchIndex(CATALOGUE)


def ids(found: SearchPage) -> list[str]:
    return [match.document.id for match in found.matches]


# What others miss


def test_a_query_in_other_words_finds_the_tool(index: SearchIndex) -> None:
    assert ids(index.search("run a sql query"))[0] == "sqlite/read_query"


def test_a_name_with_its_separators_left_out_stands_first(index: SearchIndex) -> None:
    found = index.search("find symbol")
    assert ids(found)[0] == "serena/find_symbol"
    assert found.matches[0].named


def test_a_name_that_the_query_is_stands_first(index: SearchIndex) -> None:
    for query in ("list-mail-messages", "mail.list-mail-messages", "mail/list-mail-messages"):
        assert ids(index.search(query))[0] == "mail/list-mail-messages", query
    assert ids(index.search("list mail folder messages"))[0] == "mail/list-mail-folder-messages"


def test_a_name_inside_a_sentence_stands_first(index: SearchIndex) -> None:
    query = "mail in a mail folder: please call `list-mail-messages`, then send a mail"
    assert ids(index.search(query))[0] == "mail/list-mail-messages"


def test_a_plain_word_of_a_sentence_is_not_meant_as_a_name() -> None:
    index = SearchIndex([tool("issue", "Something else"), *CATALOGUE])
    found = index.search("create a new issue in the GitHub repository of bob")
    assert ids(found)[0] == "github/create_issue"
    assert not found.matches[0].named


def test_a_query_that_nothing_answers_finds_nothing_and_says_so(index: SearchIndex) -> None:
    found = index.search("transmogrify currency")
    assert found.matches == ()
    assert not found.more
    assert '"transmogrify", "currency"' in found.hint


def test_a_word_that_is_shared_is_enough_where_the_other_is_common(index: SearchIndex) -> None:
    assert ids(index.search("find pdf"))[0] == "pdf"


def test_a_word_in_camel_case_is_what_the_documents_know() -> None:
    index = SearchIndex([*CATALOGUE, tool("git_log", "Show commits")])
    assert ids(index.search("GitHub issue"))[0] == "github/create_issue"
    assert ids(index.search("GitLog"))[0] == "git_log"
    assert ids(index.search("countWords"))[0] == "word_count"


# The rule of what answers


@pytest.mark.parametrize("query", ["zebra", "a zebra for the unicorn", "17 4"])
def test_what_shares_no_telling_word_with_a_document_finds_nothing(
    index: SearchIndex, query: str
) -> None:
    assert ids(index.search(query)) == []


def test_one_word_that_is_shared_is_enough(index: SearchIndex) -> None:
    assert ids(index.search("send telegram")) == ["mail/send-mail"]
    assert ids(index.search("list zebra unicorn quagga"))[0].startswith("mail/list")


def test_what_has_most_of_a_query_stands_first(index: SearchIndex) -> None:
    assert ids(index.search("send an email"))[0] == "mail/send-mail"
    assert ids(index.search("find the pdf forms to fill in and send"))[0] == "pdf"


def test_send_an_email_finds_the_tool_that_sends_mail() -> None:
    index = SearchIndex([Document(id="m", name="mail.send"), Document(id="o", name="pdf.merge")])
    assert ids(index.search("send an email")) == ["m"]
    assert ids(index.search("e-mail somebody")) == ["m"]


def test_words_of_the_case_at_hand_do_not_count_against_a_sentence(index: SearchIndex) -> None:
    query = "please send a mail to Bob Example about the meeting in Springfield on 2026-11-21"
    assert ids(index.search(query))[0] == "mail/send-mail"


def test_a_sentence_that_shares_one_common_word_still_finds_what_has_it() -> None:
    index = SearchIndex([tool(f"get_{n}", "Get the thing") for n in "abcdefghijklmnop"])
    assert ids(index.search("could you get me a psychologist in Novato tomorrow"))
    assert ids(index.search("could you show me a psychologist in Novato tomorrow")) == []


@pytest.mark.parametrize("query", ["", "   ", "the of and", "?!", "\x00", "\u200b"])
def test_a_query_without_words_finds_nothing_and_says_what_to_do(
    index: SearchIndex, query: str
) -> None:
    found = index.search(query)
    assert (found.matches, found.more) == ((), False)
    assert "two or three words" in found.hint


def test_an_empty_index_says_so() -> None:
    assert SearchIndex().search("anything").hint == "there is nothing to find"


# Filters and pages


def test_filters_leave_only_what_they_name(index: SearchIndex) -> None:
    assert {*ids(index.search("tables", Filter(server="mail")))} == set()
    assert ids(index.search("count words", Filter(states=("draft",)))) == ["word_count"]
    assert ids(index.search("count words", Filter(states=("trusted", "tested")))) == []
    assert ids(index.search("slug of a title", Filter(kinds=("made", "skill")))) == ["slugify"]
    assert ids(index.search("merge text", Filter(tags=("text", "office")))) == ["pdf"]
    assert ids(index.search("find_symbol", Filter(server="sqlite"))) == []


def test_a_filter_that_nothing_passes_says_so(index: SearchIndex) -> None:
    assert index.search("mail", Filter(server="none")).hint == "there is nothing to find with this filter"  # fmt: skip


def test_documents_are_browsed_in_order_of_their_names(index: SearchIndex) -> None:
    first = index.browse(Filter(server="mail"), limit=2)
    assert ids(first) == ["mail/list-mail-folder-messages", "mail/list-mail-messages"]
    assert first.more
    rest = index.browse(Filter(server="mail"), limit=2, offset=2)
    assert ids(rest) == ["mail/send-mail"]
    assert not rest.more
    assert len(index.browse().matches) == len(CATALOGUE)


def test_pages_together_are_the_whole() -> None:
    index = SearchIndex([tool(f"send_{n:03}", "Send a mail" + " now" * (n % 7)) for n in range(90)])
    whole = index.search("send mail", limit=90)
    pages = [index.search("send mail", limit=7, offset=offset) for offset in range(0, 90, 7)]
    assert [id for page in pages for id in ids(page)] == ids(whole)
    assert [page.more for page in pages] == [True] * 12 + [False]


def test_pages_end_somewhere() -> None:
    index = SearchIndex([tool(f"send_{n}") for n in range(MAX_FOUND + 50)])
    found = index.search("send", limit=10**9)
    assert len(found.matches) == MAX_FOUND
    assert not found.more
    assert index.search("send", limit=5, offset=10**9).matches == ()
    assert len(index.search("send", limit=5, offset=-3).matches) == 5
    assert index.search("send", limit=-1).matches == ()


# Change


def test_a_document_takes_the_place_of_the_one_with_its_id(index: SearchIndex) -> None:
    index.add(tool("slugify", "Shorten an address"))
    assert len(index) == len(CATALOGUE)
    assert ids(index.search("slug of a title")) == []
    assert ids(index.search("shorten address")) == ["slugify"]
    assert ids(index.browse(Filter(states=("trusted",)))) == []


def test_a_document_that_is_removed_is_not_found(index: SearchIndex) -> None:
    assert index.remove("slugify")
    assert not index.remove("slugify")
    assert "slugify" not in index
    assert ids(index.search("slugify")) == []
    assert ids(index.search("slug of a title")) == []


def test_nothing_is_left_of_documents_that_were_removed(index: SearchIndex) -> None:
    for document in CATALOGUE:
        index.remove(document.id)
    assert len(index) == 0
    assert (
        index._documents._names
        == index._documents._facets
        == index._postings._tiers
        == index._postings._words
        == {}
    )


QUERIES = ("mail messages", "find code", "run tests", "list the tables of a database", "text words")


@given(st.permutations(CATALOGUE), st.sets(st.sampled_from(CATALOGUE)))
def test_an_index_is_the_same_however_it_came_about(
    order: list[Document], again: set[Document]
) -> None:
    expected = SearchIndex(CATALOGUE)
    index = SearchIndex([tool("gone", "mail messages of tests"), *order])
    index.remove("gone")
    for document in again:
        index.add(document)
    for query in QUERIES:
        assert index.search(query) == expected.search(query)


def test_equal_documents_stand_in_the_order_of_their_ids() -> None:
    names = [f"n{number}" for number in range(40)]
    for seed in range(5):
        random.Random(seed).shuffle(names)
        index = SearchIndex([Document(id=id, name="send_mail") for id in names])
        assert ids(index.search("mail", limit=40)) == sorted(names)
        assert ids(index.search("send_mail", limit=3)) == sorted(names)[:3]


def test_many_threads_may_search_while_documents_come_and_go(index: SearchIndex) -> None:
    def change(name: str) -> bool:
        for number in range(200):
            index.add(tool(name, f"mail number {number}"))
            assert ids(index.search("list mail"))
            index.remove(name)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(change, ("one", "two", "three", "one")))
    assert len(index) == len(CATALOGUE)


# Hostile text


@pytest.mark.parametrize(
    "text",
    [
        "mail " * 20_000,
        " ".join(f"w{n}x" for n in range(20_000)),
        "aB" * 50_000,
        "a-b_" * 25_000,
        "\u202e\u200b\ud800\x00mail" * 10_000,
        "\ufdfa" * 50_000,
    ],
)
def test_hostile_queries_and_descriptions_are_bounded(index: SearchIndex, text: str) -> None:
    found = index.search(text)
    found.hint.encode()
    assert len(found.hint) < 1000
    index.add(document_of("hostile", "x", text * 10, {"properties": {text: {"description": text}}}))
    assert len(index._postings._words[index._documents.number("hostile")]) < 5000
    assert ids(index.search("find symbol"))[0] == "serena/find_symbol"
    index.remove("hostile")


def test_a_hint_repeats_nothing_that_hides(index: SearchIndex) -> None:
    hint = index.search("zeb\u202era\x1b[31m").hint
    assert "\u202e" not in hint
    assert "\x1b" not in hint


def test_a_description_that_repeats_every_word_is_not_first(index: SearchIndex) -> None:
    """Who wants to be called for everything gains nothing by saying everything."""
    said = " ".join(f"{each.name} {each.description}" for each in CATALOGUE)
    index.add(tool("greedy", said * 5))
    for query in ("run tests", "send mail", "list tables", "count the words of a text"):
        assert ids(index.search(query))[0] != "greedy", query


# Ranking


def put(postings: Postings, document: int, *fields: str) -> None:
    postings.add(document, [words(text) for text in (*fields, *[""] * (len(FIELDS) - len(fields)))])


def test_a_name_says_more_than_a_description_and_that_more_than_parameters() -> None:
    postings = Postings()
    put(postings, 0, "mail", "a b c d")
    put(postings, 1, "other", "mail b c d")
    put(postings, 2, "other", "a b c d", "mail")
    scores = postings.best({"mail": 100}, 3)
    assert sorted(scores, key=lambda each: -scores[each]) == [0, 1, 2]


def test_a_long_text_counts_less_than_a_short_one() -> None:
    postings = Postings()
    put(postings, 0, "x", "mail")
    put(postings, 1, "x", "mail " + "word " * 100)
    scores = postings.best({"mail": 100}, 2)
    assert scores[0] > scores[1]


def exhaustive(postings: Postings, rarities: dict[str, int]) -> dict[int, int]:
    scores: dict[int, int] = {}
    for word, rarity in rarities.items():
        for tier in postings._tiers.get(word, {}).values():
            for document, impact in tier.items():
                scores[document] = scores.get(document, 0) + rarity * impact
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_out_would_not_have_been_among_the_best(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postings_module, "_FEW", 4)
    chance = random.Random(seed)
    vocabulary = [f"w{'x' * n}" for n in range(30)]
    postings = Postings()
    for document in range(1000):
        text = [" ".join(chance.choices(vocabulary, weights=range(1, 31), k=6)) for _ in range(3)]
        put(postings, document, *text)
    rarities = {word: postings.rarity(word) for word in chance.sample(vocabulary, 6)}
    every = exhaustive(postings, rarities)
    allowed = set(chance.sample(range(1000), 300))
    for only in (None, allowed):
        expected = {each: score for each, score in every.items() if only is None or each in only}
        floor = sorted(expected.values())[-10]
        best = {each: score for each, score in expected.items() if score >= floor}
        assert postings.best(rarities, 10, only) == best


def counted_additions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the lists that are added up from now on."""
    added: list[int] = []
    add_up = postings_module._add_up

    def counting(
        scores: dict[int, int], turn: postings_module._Turn, allowed: Set[int] | None
    ) -> None:
        added.append(len(turn.tier))
        add_up(scores, turn, allowed)

    monkeypatch.setattr(postings_module, "_add_up", counting)
    return added


def test_less_is_added_up_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would hold for a postings list that leaves nothing out."""
    monkeypatch.setattr(postings_module, "_FEW", 4)
    added = counted_additions(monkeypatch)
    postings = Postings()
    for document in range(1000):
        put(postings, document, f"mail {'money' if document < 20 else 'time'}")
    assert len(postings.best({"monei": 4000, "mail": 1}, 5)) == 20
    assert sum(added) == 20


def test_two_later_words_may_say_more_than_one_early_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings_module, "_FEW", 4)
    postings = Postings()
    for document in range(50):
        put(postings, document, "mail")
    put(postings, 50, "other", "tax bill")
    assert [*postings.best({"mail": 100, "tax": 90, "bill": 90}, 1)] == [50]


def test_a_query_of_common_words_adds_up_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings_module, "_EFFORT", 500)
    added = counted_additions(monkeypatch)
    names = [f"{letter}x" for letter in "abcdefghij"]
    postings = Postings()
    for document in range(1000):
        first, second = document % 10, (document + 1 + document // 10 % 2) % 10
        put(postings, document, names[first], names[second])
    rarities = {name: 100 + place for place, name in enumerate(names)}
    best = postings.best(rarities, 5)
    assert sum(added) <= 500
    assert max(best.values()) == max(exhaustive(postings, rarities).values())


# Words and meaning


class Meanings:
    """Knows what is told: query to ids, nearest first."""

    def __init__(self, told: dict[str, list[tuple[str, float]]]) -> None:
        self.told = told
        self.known: dict[str, str] = {}

    def add(self, texts: dict[str, str]) -> None:
        self.known |= texts

    def remove(self, id: str) -> None:
        del self.known[id]

    def nearest(self, query: str, count: int, allowed: Set[str] | None) -> list[tuple[str, float]]:
        near = self.told.get(query, [])
        return [each for each in near if allowed is None or each[0] in allowed][:count]


def test_two_orders_become_one() -> None:
    assert fuse([["a", "b", "c"], ["c", "b", "d"]]) == ["c", "b", "a", "d"]
    assert fuse([["b", "a"], ["a", "b"]]) == ["a", "b"]
    assert fuse([[], ["a"]]) == ["a"]
    assert fuse([]) == []


def test_a_first_place_counts_more_than_two_far_ones() -> None:
    words_find = ["best", *[f"w{n:02}" for n in range(14)], "both"]
    meaning_finds = [*[f"m{n:02}" for n in range(14)], "both"]
    order = fuse([words_find, meaning_finds])
    assert order.index("best") < order.index("both") < order.index("w02")


def test_meaning_finds_what_no_word_does() -> None:
    near = [("mail/send-mail", 0.7), ("ci/run_tests", 0.1)]
    index = SearchIndex(CATALOGUE, Meanings({"drop somebody a line": near}))
    assert ids(index.search("drop somebody a line")) == ["mail/send-mail"]


def test_what_words_and_meaning_agree_on_stands_first() -> None:
    near = [("serena/find_file", 0.5), ("serena/find_referencing_symbols", 0.6)]
    index = SearchIndex(CATALOGUE, Meanings({"code that uses a symbol": sorted(near, key=str)}))
    assert ids(index.search("code that uses a symbol"))[0] == "serena/find_referencing_symbols"


def test_a_name_stands_before_words_and_meaning() -> None:
    index = SearchIndex(CATALOGUE, Meanings({"find symbol": [("serena/find_file", 0.9)]}))
    assert ids(index.search("find symbol"))[0] == "serena/find_symbol"


def test_what_is_far_in_words_and_meaning_is_not_found() -> None:
    far = [(document.id, 0.1) for document in CATALOGUE]
    index = SearchIndex(CATALOGUE, Meanings({"transmogrify currency": far}))
    found = index.search("transmogrify currency")
    assert found.matches == ()
    assert '"currency"' in found.hint


def test_what_is_far_in_meaning_and_shares_a_word_is_found() -> None:
    far = [(document.id, 0.1) for document in CATALOGUE]
    index = SearchIndex(CATALOGUE, Meanings({"send telegram": far}))
    assert ids(index.search("send telegram")) == ["mail/send-mail"]


def test_once_one_answers_half_as_near_is_near_enough_for_the_others() -> None:
    near = [("mail/send-mail", 0.31), ("ci/run_tests", 0.16), ("pdf", 0.14)]
    index = SearchIndex(CATALOGUE, Meanings({"drop a line": near}))
    assert ids(index.search("drop a line")) == ["mail/send-mail", "ci/run_tests"]


def test_a_sentence_may_be_a_little_further_from_what_answers_it() -> None:
    near = [("mail/send-mail", 0.26)]
    sentence = "would you drop my dear old aunt a line"
    index = SearchIndex(CATALOGUE, Meanings({"drop a line": near, sentence: near}))
    assert ids(index.search("drop a line")) == []
    assert ids(index.search(sentence)) == ["mail/send-mail"]


def test_meaning_keeps_to_filters_and_learns_and_forgets() -> None:
    meanings = Meanings({"drop a line": [("mail/send-mail", 0.7), ("pdf", 0.6)]})
    index = SearchIndex(CATALOGUE, meanings)
    assert ids(index.search("drop a line", Filter(kinds=("skill",)))) == ["pdf"]
    assert {*meanings.known} == {document.id for document in CATALOGUE}
    assert meanings.known["sqlite/read_query"] == (
        "sqlite read query: Execute a SELECT query on the SQLite database (query)"
    )
    index.remove("pdf")
    assert "pdf" not in meanings.known


# How much of what is asked for is found: 1,053 questions of people to 457 functions (BFCL v4)


@pytest.mark.needs("shared")
def test_words_alone_find_most_of_what_people_ask_for() -> None:
    asked = questions(SHARED / "data")
    index = SearchIndex(asked.documents)
    places = [
        [match.document.id in answers for match in index.search(text, limit=10).matches]
        for text, answers in asked.questions
    ]
    assert (len(index), len(places)) == (457, 1053)
    for count, least in ((1, 0.64), (5, 0.87), (10, 0.92)):
        hits = sum(any(place[:count]) for place in places)
        assert hits >= least * len(places), f"hit@{count}: {hits / len(places):.3f}"
