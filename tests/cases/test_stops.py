"""Reports of texts that end too late, too early, or not at all: each is cut where the slow decoder cuts it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import slow_greedy
from transformers import MaxLengthCriteria, StoppingCriteria, StopStringCriteria

import specdec_lib as sd
from specdec_lib.decode.stopping import Stopping, TextStream
from specdec_lib.detokenize import Detokenizer

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]
LONG = 32


@pytest.fixture(scope="module")
def text(tiny):
    """What is written when nothing stops it, as ids and as characters (one each here)."""
    ids = slow_greedy(tiny().model, PROMPT, LONG)
    return ids, tiny().decode(ids)


def check(case, gamma=5, draft=None, **options):
    """Ours, drafted and plain, against the slow decoder; returns the drafted run."""
    settings = {"max_new_tokens": LONG, "eos": []} | options
    told = {"n": settings["max_new_tokens"], "ends": settings["eos"], "min_new": options.get("min_new_tokens", 0)}
    stop, criteria = options.get("stop", []), options.get("criteria", [])
    expected = slow_greedy(case.model, PROMPT, **told, stop=stop, criteria=criteria, decode=case.decode)
    pair = case.with_draft(draft or case.pair.target)  # the target itself: whole blocks are accepted
    out = sd.generate(pair, PROMPT, gamma=gamma, **settings)
    assert out.tokens == [expected]
    plain = sd.generate_plain(pair, PROMPT, **settings)
    assert (plain.tokens, plain.texts, plain.ended) == (out.tokens, out.texts, out.ended)
    return out


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_stop_strings_across_tokens_and_inside_blocks(gamma, tiny, text):
    """https://github.com/huggingface/transformers/issues/48039 - a stop string that ended within a block was missed."""
    case, trimmed = tiny(), 0
    for start in range(0, len(text[1]) - 3, 2):
        stop = text[1][start : start + 3]
        out = check(case, gamma, stop=[stop, "never"])
        assert out.ended == ["stop string"]
        assert out.texts == [text[1][: text[1].index(stop)]]  # https://github.com/vllm-project/vllm/pull/47616
        trimmed += out.stats.trimmed
    assert trimmed > 0


def test_a_single_stop_string_need_not_be_a_list(tiny, text):
    pair = tiny().pair
    one, listed = (sd.generate(pair, PROMPT, stop=s, eos=[]) for s in (text[1][4:6], [text[1][4:6]]))
    assert one.tokens == listed.tokens and one.ended == ["stop string"]


def test_transformers_own_criteria_cut_where_its_own_loop_does(tiny, text):
    """https://github.com/huggingface/transformers/issues/48039 - criteria asked once a block."""
    case = tiny()
    for start in (2, 9, 17):
        stop = StopStringCriteria(case.pair.tokenizer, [text[1][start : start + 2]])
        assert check(case, criteria=[stop]).ended == ["criterion"]
    assert len(check(case, criteria=[MaxLengthCriteria(len(PROMPT) + 7)]).tokens[0]) == 7


def test_a_criterion_is_asked_once_a_token_in_order(tiny):
    """https://github.com/huggingface/transformers/issues/48039 - one that counts its calls stopped at another place."""

    class Counts(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids.shape[1])
            return len(self.seen) == 13

    counts = Counts()
    case = tiny()
    out = sd.generate(case.with_draft(case.pair.target), PROMPT, gamma=4, criteria=counts, eos=[])
    assert len(out.tokens[0]) == 13 and out.ended == ["criterion"]
    assert counts.seen == list(range(len(PROMPT) + 1, len(PROMPT) + 14))
    counts = Counts()  # also about the token that ends the text for another reason, as transformers does
    sd.generate(case.with_draft(case.pair.target), PROMPT, gamma=4, criteria=counts, eos=out.tokens[0][5:6])
    assert counts.seen == list(range(len(PROMPT) + 1, len(PROMPT) + 2 + out.tokens[0].index(out.tokens[0][5])))


@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
def test_an_end_in_the_block_with_several_ends(gamma, tiny, text):
    """https://github.com/huggingface/transformers/issues/47912 - tokens after an end-of-sequence token in a block."""
    case = tiny()
    for i in range(0, LONG, 3):
        out = check(case, gamma, eos=sorted({text[0][i], text[0][-1]}))
        assert out.ended == ["end token"]
        # https://github.com/vllm-project/vllm/issues/56101 - tokens past the end counted as accepted
        assert out.stats.kept <= len(out.tokens[0])


def test_no_end_at_all(tiny):
    """https://github.com/huggingface/transformers/pull/46790 - a crash where there is no end-of-sequence id."""
    assert check(tiny()).ended == ["length"]


@pytest.mark.parametrize("n", range(9))
def test_exact_lengths_below_and_above_a_block(n, tiny):
    """https://github.com/huggingface/transformers/issues/46993 - drafts longer than what remained were kept."""
    assert len(check(tiny(), gamma=6, max_new_tokens=n).tokens[0]) == n


@pytest.mark.parametrize("least", [1, 4, 9])
def test_no_end_before_the_least_length(least, tiny, text):
    """https://github.com/vllm-project/vllm/pull/32642 - the least length not kept at later positions of a block."""
    case = tiny()
    out = check(case, min_new_tokens=least, eos=sorted(set(text[0][:6])))
    assert len(out.tokens[0]) > least
    assert not set(out.tokens[0][:least]) & set(text[0][:6])


def test_to_the_end_of_the_context(tiny):
    """https://github.com/vllm-project/vllm/issues/5342 - past the end of a context: finish, do not fail."""
    case = tiny(max_position_embeddings=24)
    out = check(case, max_new_tokens=16)
    open_end = sd.generate(case.with_draft(case.pair.target), PROMPT, gamma=6, max_new_tokens=None, eos=[])
    assert open_end.tokens == out.tokens and open_end.ended == ["context"] and out.ended == ["length"]
    with pytest.raises(sd.SpecdecError, match="exceed the target's context of 24"):
        sd.generate(case.pair, PROMPT, max_new_tokens=17)
    with pytest.raises(sd.SpecdecError, match="a prompt of 24 tokens exceed"):
        sd.generate(case.pair, PROMPT * 3, max_new_tokens=None)


@given(
    gamma=st.integers(1, 8),
    n=st.integers(0, 24),
    least=st.integers(0, 6),
    ends=st.lists(st.integers(0, 45), max_size=3),
    stop=st.lists(st.text("abcdefgh0123 .", min_size=1, max_size=2), max_size=3),
    limit=st.integers(1, 40),
    noise=st.sampled_from([0.0, 0.2, 1.0]),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stops_first(tiny, gamma, n, least, ends, stop, limit, noise):
    case = tiny(noise=noise)
    rules = [MaxLengthCriteria(limit)]
    options = {"max_new_tokens": n, "min_new_tokens": min(least, n), "eos": ends, "stop": stop, "criteria": rules}
    check(case, gamma, case.pair.draft, **options)


# -- streaming -----------------------------------------------------------------------------------------


def streamed(pair, prompts, **options):
    pieces = [[] for _ in prompts]
    out = sd.generate(pair, prompts, on_text=lambda row, text: pieces[row].append(text), **options)
    assert all(all(row) for row in pieces)  # no empty piece
    return ["".join(row) for row in pieces], out


def test_the_stream_is_the_text(tiny, text):
    """https://github.com/vllm-project/vllm/pull/26027 - several tokens at once, and words went missing."""
    case = tiny()
    prompts = [PROMPT, [4, 4, 4], [9]]
    for options in ({}, {"stop": [text[1][7:10], "qq"]}, {"batch_size": 3}, {"stop": [text[1][7:10]], "gamma": 1}):
        shown, out = streamed(case.pair, prompts, max_new_tokens=LONG, eos=[], **options)
        assert shown == out.texts and any(out.texts)


def test_characters_of_several_tokens_stay_whole():
    """https://github.com/ggml-org/llama.cpp/pull/4446 - half a character shown as a replacement character."""
    said = "caf\u00e9 \u2014 \U0001f525\u4f60 !"

    def decode(ids):
        return bytes(ids).decode("utf-8", "replace")

    bytes_of = list(said.encode())
    for size in (1, 2, 3, 5):
        stream = TextStream(Stopping(frozenset(), decode=Detokenizer(decode)))
        pieces = [stream.piece(bytes_of[i : i + size]) for i in range(0, len(bytes_of), size)]
        pieces.append(stream.piece([], last=True))
        assert "".join(pieces) == said
        assert "\ufffd" not in "".join(pieces)
    broken = TextStream(Stopping(frozenset(), decode=Detokenizer(decode)))
    assert broken.piece([97, 0xE2]) == "a" and broken.piece([0x82], last=True) == "\ufffd"  # it never became one


def test_a_stop_string_is_not_shown_before_it_is_complete():
    """https://github.com/vllm-project/vllm/pull/47616 - the beginning of a stop string had already been sent."""
    stream = TextStream(Stopping(frozenset(), strings=("END",), decode=Detokenizer(lambda ids: "".join(map(chr, ids)))))
    pieces = [stream.piece([ord(c)]) for c in "ENtEND"]
    assert pieces == ["", "", "ENt", "", "", ""] and stream.piece([ord("x")], last=True) == ""


def test_a_tokenizer_that_moves_punctuation_is_shown_by_whole_words():
    """https://github.com/vllm-project/vllm/pull/26027 - a shown space that the next token takes away."""
    decode = Detokenizer(lambda ids: "".join(map(chr, ids)).replace(" .", "."), tidies=True)
    stream = TextStream(Stopping(frozenset(), decode=decode))
    pieces = [stream.piece([ord(c)]) for c in "so it is . yes"]
    assert "".join([*pieces, stream.piece([], last=True)]) == "so it is. yes"


# -- input that cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, "at least one character"),
        ({"stop": [3]}, "at least one character"),
        ({"stop": ["x<eos>"]}, "'<eos>', a special token, which texts do not show"),
        ({"criteria": [3]}, "a stopping criterion is a function"),
        ({"eos": [46]}, "ids below the vocabulary's 46"),
        ({"eos": ["<eos>"]}, "eos must be a whole number >= 0, got '<eos>'"),
        ({"min_new_tokens": -1}, "min_new_tokens must be a whole number >= 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"min_new_tokens \(9\) exceeds the 8"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1"),
    ],
)
def test_stops_that_could_not_work_are_refused(options, message, tiny):
    """https://github.com/huggingface/transformers/issues/40739 - an option that is taken and does nothing."""
    for decode in (sd.generate, sd.generate_plain):
        with pytest.raises(sd.SpecdecError, match=message):
            decode(tiny().pair, PROMPT, **options)


@pytest.mark.parametrize("options", [{"stop": "a"}, {"on_text": print}])
def test_text_without_a_tokenizer_is_refused(options, tiny):
    """https://github.com/huggingface/transformers/issues/48039 - stop strings without a tokenizer to read them with."""
    pair = sd.Pair(tiny().pair.target, tiny().pair.draft)
    with pytest.raises(sd.SpecdecError, match="tokenizer"):
        sd.generate(pair, PROMPT, **options)
