"""What the loop holds its parts to: a drafter's promise, logits that are numbers, room that grows as it is needed."""

from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch

import specdec_lib as sd
from specdec_lib.drafters import Draft, DraftSession
from specdec_lib.drafters.model import Reader, common_prefix_length
from specdec_lib.models import load_model, load_transformers, open_session
from specdec_lib.sampling import SamplingParams
from specdec_lib.verify import VERIFIERS
from specdec_lib.verify.lossy import lenience_greedy

PROMPT = [5, 9, 17, 3]
V = 46


@pytest.fixture(scope="module")
def target(tiny_folder):
    return load_model(tiny_folder("llama"), "cpu")


class Says(sd.Drafter):
    """Proposes what `draft(gamma)` makes."""

    def __init__(self, draft):
        self.draft = draft

    def start(self, vocabulary):
        session = DraftSession()
        session.propose = lambda prefix, gamma, params, random: self.draft(gamma)
        return session


def uniform(gamma, **changes):
    return Draft([1] * gamma, torch.full((gamma, V), 1 / V), **changes)


PROMISES = {
    "more tokens than asked for": (lambda g: uniform(g + 3), "drafted 5 tokens where 2 were asked for"),
    "a token outside the vocabulary": (lambda g: Draft([V], torch.full((1, V), 1 / V)), f"drafted token {V}, outside"),
    "no probabilities": (lambda g: Draft([1]), "without probabilities: return Draft"),
    "log-probabilities": (lambda g: Draft([1], torch.full((1, V), 1 / V).log()), "probabilities that sum to -176"),
    "halved": (lambda g: Draft([1], torch.full((1, V), 0.5 / V)), r"probabilities that sum to 0\.5, not 1"),
    "NaN": (lambda g: Draft([1], torch.full((1, V), float("nan"))), "probabilities that sum to nan"),
    "too few rows": (
        lambda g: Draft([1, 2], torch.full((1, V), 1 / V)),
        r"of shape \(1, 46\): they must have shape \(2",
    ),
    "too narrow": (
        lambda g: Draft([1], torch.full((1, 9), 1 / 9)),
        r"of shape \(1, 9\): they must have shape \(1, 46\)",
    ),
    "certain, with probabilities": (lambda g: uniform(1, certain=True), "with probabilities certain"),
    "no draft": (lambda g: [1, 2], "must return a Draft, got a list"),
}


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_drafter_that_breaks_its_promise_is_named(name, batch_size, target):
    draft, message = PROMISES[name]
    with pytest.raises(sd.SpecdecError, match=f"Says .*{message}"):
        pair = sd.Pair(target, Says(draft))
        sd.generate(pair, [PROMPT, [4]], 2, 8, temperature=1.0, eos=[], batch_size=batch_size)


def test_a_drafter_that_keeps_its_promise_writes_the_targets_text(target):
    plain = sd.generate_plain(sd.Pair(target), PROMPT, 12, eos=[]).tokens
    for draft in (uniform, lambda g: Draft([1]), lambda g: Draft([1], certain=True), lambda g: Draft([])):
        assert sd.generate(sd.Pair(target, Says(draft)), PROMPT, 2, 12, eos=[]).tokens == plain


# -- logits that are no numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "verifier": "block"},
     {"temperature": 1.0, "drafts": 2}, {"batch_size": 2}, {"verifier": lenience_greedy(0.5)}],
)  # fmt: skip
def test_a_broken_model_is_named_with_the_position(value, kind, options, tiny_folder):
    model = load_transformers(tiny_folder(kind), "cpu")
    broken = load_transformers(tiny_folder(kind), "cpu")
    norm = broken.model.norm if kind == "llama" else broken.transformer.ln_f
    norm.weight.data[0] = value
    with pytest.raises(sd.SpecdecError, match=r"gave logits whose largest is (nan|inf) after \d+ tokens"):
        sd.generate(sd.Pair(broken, model), [PROMPT, [4]], 2, 6, eos=[], **options)
    with pytest.raises(sd.SpecdecError, match="after 4 tokens: its weights are damaged"):
        sd.generate_plain(sd.Pair(broken), PROMPT, 6, temperature=options.get("temperature", 0.0), eos=[])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_costs_no_token_outside_the_vocabulary(temperature, tiny_folder):
    """At temperature 0 its tokens are refused by the target; above it what it reports is no distribution."""
    target, broken = (load_transformers(tiny_folder("llama"), "cpu") for _ in range(2))
    broken.model.norm.weight.data[0] = float("nan")
    pair = sd.Pair(target, broken)
    if temperature:
        with pytest.raises(sd.SpecdecError, match="ModelDrafter reports probabilities that sum to nan"):
            sd.generate(pair, PROMPT, 2, 6, temperature=1.0, eos=[])
    else:
        assert sd.generate(pair, PROMPT, 2, 6, eos=[]).tokens == sd.generate_plain(pair, PROMPT, 6, eos=[]).tokens


def test_one_nan_row_of_the_head_is_seen(tiny_folder):
    model = load_transformers(tiny_folder("llama"), "cpu")
    model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(sd.SpecdecError, match="largest is nan"):
        sd.generate(sd.Pair(model, sd.PromptLookupDrafter()), PROMPT * 2, 3, 6, temperature=1.0, eos=[])


# -- precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_of_a_bfloat16_model_are_computed_in_float32(temperature, tiny_folder):
    model = load_transformers(tiny_folder("llama"), "cpu", "bfloat16")
    out = sd.generate(sd.Pair(model, model), PROMPT, 3, 12, temperature=temperature, eos=[], logprobs=True)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + out.tokens[0][:-1]])).logits[0, len(PROMPT) - 1 :]
    expected = logits.float().log_softmax(-1)[range(12), out.tokens[0]]
    found = torch.tensor(out.logprobs[0])
    coarse = logits.log_softmax(-1)[range(12), out.tokens[0]].float()
    assert (coarse - expected).abs().max() > 1e-3  # bfloat16 steps
    # a block of positions rounds otherwise than one pass over all: compare where the logits are the same
    assert (found - expected).abs().median() < 0.02
    assert any(x != float(torch.tensor(x).bfloat16()) for x in out.logprobs[0])


def test_rules_at_zero_see_float32_probabilities(tiny_folder):
    seen = []
    rule = lenience_greedy(0.5)
    spy = type(rule)(**{**vars(rule), "accepted": lambda p, q, x: seen.append(p.dtype) or rule.accepted(p, q, x)})
    model = load_transformers(tiny_folder("llama"), "cpu", "bfloat16")
    sd.generate(sd.Pair(model, model), PROMPT, 3, 6, verifier=spy, eos=[])
    assert set(seen) == {torch.float32}


# -- room ----------------------------------------------------------------------------------------------


def test_no_limit_makes_no_room_for_the_whole_context(tiny_folder):
    model = load_model(tiny_folder("llama", max_position_embeddings=100_000), "cpu")
    opened = []

    def spy(*given):
        opened.append(open_session(*given))
        return opened[-1]

    end = sd.generate_plain(sd.Pair(model), PROMPT, 6, eos=[]).tokens[0][-1]
    with patch("specdec_lib.decode.loop.open_session", spy):
        out = sd.generate(sd.Pair(model, model), PROMPT, 4, None, eos=[end])
    assert out.ended == ["end token"] and opened[0].cache.capacity < 1000


def test_a_long_text_outgrows_the_room_at_first(tiny_folder):
    model = load_model(tiny_folder("llama", max_position_embeddings=2048), "cpu")
    long = sd.generate(sd.Pair(model, model), PROMPT, 7, 700, eos=[])
    assert long.tokens == sd.generate_plain(sd.Pair(model), PROMPT, 700, eos=[]).tokens


# -- what a draft model has read -----------------------------------------------------------------------


def test_a_reader_goes_on_from_what_was_written():
    reader = Reader([1, 2, 3])
    reader.note(Draft([4, 5, 6]))  # 4 and 5 were read, 6 was not
    assert reader.sync([1, 2, 3, 4, 9]) == 4 and reader.read == [1, 2, 3, 4]
    assert reader.sync([1, 2, 3, 4, 9]) == 4  # the last token is always read again
    assert reader.sync([1, 2, 8, 8]) == 2 and reader.read == [1, 2]  # another text


def test_a_common_prefix_is_found_wherever_it_ends():
    rng = np.random.default_rng(0)
    for _ in range(200):
        a = rng.integers(3, size=rng.integers(12)).tolist()
        b = a[: rng.integers(len(a) + 1)] + rng.integers(3, size=rng.integers(6)).tolist()
        n = common_prefix_length(a, b)
        assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


# -- options out of type -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 5}, "logprobs must be True or False, got 5"),
        ({"top_k": True, "temperature": 1.0}, "top_k must be a whole number >= 1, got True"),
        ({"top_p": "0.9", "temperature": 1.0}, r"top_p must lie in \(0, 1\], got '0.9'"),
        ({"seed": None}, "seed must be a whole number >= 0, got None"),
        ({"temperature": 1e-38}, "temperature 1e-38 is too small to divide by: use 0"),
        ({"verifier": ["token"]}, r"unknown verifier \['token'\]"),
        ({"gamma": sd.PromptLookupDrafter()}, "gamma is a drafter, PromptLookupDrafter"),
        ({"on_round": 3}, "on_round must be a function, got 3"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number >= 0, got 2.5"),
    ],
)
def test_an_option_out_of_type_is_one_clear_line(options, message, target):
    with pytest.raises(sd.SpecdecError, match=message):
        sd.generate(sd.Pair(target, target), PROMPT, **options)
    with pytest.raises(TypeError, match=r"generate\(\) has no option 'top_q': it takes max_new_tokens, temperature"):
        sd.generate(sd.Pair(target, target), PROMPT, top_q=1)


def test_numbers_of_numpy_and_torch_count(target):
    pair = sd.Pair(target, target)
    given = {"max_new_tokens": np.int64(6), "temperature": np.float32(1), "top_k": torch.tensor(9), "seed": np.int32(3)}
    found = sd.generate(pair, np.array(PROMPT), np.int64(3), **given).tokens
    assert found == sd.generate(pair, PROMPT, 3, 6, temperature=1.0, top_k=9, seed=3).tokens
    assert found == sd.generate(pair, list(np.array(PROMPT)), 3, 6, temperature=1.0, top_k=9, seed=3).tokens
    for empty in (torch.tensor(5), torch.empty(0, 5, dtype=torch.long), np.empty((0, 3), int)):
        with pytest.raises(sd.SpecdecError, match="prompt"):
            sd.generate(pair, empty)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (sd.PromptLookupDrafter, "PromptLookupDrafter is a class: give an instance"),
        (VERIFIERS["token"], "a Verifier is not a draft"),
        (object(), "is not a draft: give a model, or a subclass of specdec_lib.Drafter"),
    ],
)
def test_what_is_no_draft(draft, message, target):
    with pytest.raises(sd.SpecdecError, match=message):
        sd.generate(sd.Pair(target, draft), PROMPT)


def test_a_draw_takes_one_number_of_the_texts_own_generator():
    from specdec_lib.sampling import draw

    random, again = Random(5), Random(5)
    probs = SamplingParams(1.0).probs(torch.zeros(4))
    assert int(draw(probs, random)) == int(again.random() * 4)
    assert random.random() == again.random()
