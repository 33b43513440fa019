"""https://github.com/huggingface/transformers/issues/40739 - an option that is taken and silently does nothing.

Every option of `generate` has a witness: something that is true of a run with the option and false of the same run
without it.  Options are then given two at a time: both witnesses must hold, or the pair is refused.
"""

import inspect
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit import slow_scores

import specdec_lib as sd
from specdec_lib.decode.draft_length import Confidence, Fastest, Heuristic
from specdec_lib.drafters import SamplingParams
from specdec_lib.models.session import open_session
from specdec_lib.verify import VERIFIERS, Verifier

PROMPTS = [[5, 9, 17, 3, 8, 9, 17, 3], [30, 2, 2]]
CONTEXT = 28
BASE = {"max_new_tokens": 12, "eos": []}


@dataclass
class Run:
    """One decoding and all that it let be seen."""

    options: dict
    case: Any
    rounds: list = field(default_factory=list)
    pieces: list = field(default_factory=list)
    verified: int = 0
    batches: int = 0

    def __post_init__(self):
        options = BASE | self.options
        draft = options.pop("draft", self.case.pair.draft)
        if options.get("verifier") == "spy":
            options["verifier"] = Verifier("spy", self.spy, VERIFIERS["block"].correction, True, "")
        if "on_round" in options:
            options["on_round"] = self.rounds.append
        if "on_text" in options:
            options["on_text"] = lambda row, text: self.pieces.append((row, text))
        with patch("specdec_lib.decode.loop.open_session", wraps=open_session) as opened:
            self.out = sd.generate(self.case.with_draft(draft), PROMPTS, **options)
        self.batches = opened.call_count

    def spy(self, p, q, x):
        self.verified += 1
        return VERIFIERS["block"].accepted(p, q, x)

    def again(self, **changes):
        return Run(self.options | changes, self.case)

    def allowed(self, **truncation):
        """Whether every token has probability in the law after the processors and this truncation."""
        sampling = SamplingParams(self.options.get("temperature", 1.0), **truncation)
        processors = self.options.get("processors", ())
        for prompt, tokens in zip(PROMPTS, self.out.tokens, strict=True):
            for i, token in enumerate(tokens):
                ends, least = self.options.get("eos", ()), self.options.get("min_new_tokens", 0)
                ids = prompt + tokens[:i]
                if sampling.probs(slow_scores(self.case.model, ids, len(prompt), ends, least, processors))[token] == 0:
                    return False
        return True

    @property
    def texts_as_tokens(self):
        return [self.case.decode(tokens) for tokens in self.out.tokens]


def ban(token):
    return lambda ids, scores: scores.index_fill(1, torch.tensor([token]), float("-inf"))


def inside(run, token):
    """Whether the token stands anywhere but at the end of a row."""
    return any(token in tokens[:-1] for tokens in run.out.tokens)


# name: (options, what they are added to, witness)
def options_of(often, word):
    """The options, for a token that often occurs in the base run and a string that its text has."""
    sampled = {"temperature": 1.0}
    lookup = sd.PromptLookupDrafter(max_ngram=1)
    return {
        "gamma": ({"gamma": 2}, {}, lambda r: {len(d.drafted) for d in r.out.trace} <= {0, 1, 2}),
        "heuristic": ({"gamma": Heuristic(1)}, {}, lambda r: len(r.out.trace[0].drafted) <= 1),
        "confidence": ({"gamma": Confidence(1.0, 4)}, {}, lambda r: max(len(d.drafted) for d in r.out.trace) == 1),
        "fastest": ({"gamma": Fastest(2, 3)}, {}, lambda r: max(len(d.drafted) for d in r.out.trace) <= 3),
        "length": ({"max_new_tokens": 5}, {}, lambda r: max(map(len, r.out.tokens)) <= 5),
        "open": ({"max_new_tokens": None}, {}, lambda r: "length" not in r.out.ended),
        "temperature": (sampled, {}, lambda r: any(0 < p < 1 for d in r.out.trace for p in d.p)),
        "top_k": (sampled | {"top_k": 2}, sampled, lambda r: r.allowed(top_k=2)),
        "top_p": (sampled | {"top_p": 0.5}, sampled, lambda r: r.allowed(top_p=0.5)),
        "min_p": (sampled | {"min_p": 0.3}, sampled, lambda r: r.allowed(min_p=0.3)),
        "verifier": ({"verifier": "spy"}, {}, lambda r: r.verified == r.out.stats.rounds),
        "seed": (sampled | {"seed": 3}, sampled, lambda r: r.again(seed=0).out.tokens != r.out.tokens),
        "eos": ({"eos": [often]}, {}, lambda r: not inside(r, often)),
        "on_round": ({"on_round": True}, {}, lambda r: len(r.rounds) == r.out.stats.rounds),
        "min_new_tokens": (
            {"eos": [often], "min_new_tokens": 7},
            {"eos": [often]},
            lambda r: all(often not in tokens[:7] for tokens in r.out.tokens),
        ),
        "stop": (
            {"stop": word},
            {},
            lambda r: (
                not any(word in text for text in r.out.texts) and not any(word in t[:-1] for t in r.texts_as_tokens)
            ),
        ),
        "criteria": ({"criteria": lambda ids, _: ids[0, -1] == often}, {}, lambda r: not inside(r, often)),
        "processors": (
            {"processors": [ban(often)]},
            {},
            lambda r: not any(often in tokens for tokens in r.out.tokens),
        ),
        "logprobs": (
            {"logprobs": True},
            {},
            lambda r: sum(len(d.logprobs) for d in r.out.trace) == r.out.stats.emitted,
        ),
        "on_text": (
            {"on_text": True},
            {},
            lambda r: ["".join(t for row, t in r.pieces if row == i) for i in range(2)] == r.out.texts,
        ),
        "batch_size": ({"batch_size": 2}, {}, lambda r: r.batches == 1),
        "drafts": (sampled | {"drafts": 2}, sampled, lambda r: {len(d.drafts) for d in r.out.trace} == {2}),
        "lookup": ({"draft": lookup}, {}, lambda r: r.out.stats.draft_passes == 0 < r.out.stats.drafted),
    }


@pytest.fixture(scope="module")
def case(tiny):
    return tiny(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def options(case):
    tokens = Run({}, case).out.tokens[0]
    often = tokens[4]
    text = case.decode(tokens)
    return options_of(often, text[5:7])


NAMES = list(options_of(0, "x"))


def test_every_parameter_is_among_them(options):
    given = {name for extra, _, _ in options.values() for name in extra} - {"draft"}
    assert given == set(inspect.signature(sd.generate).parameters) - {"pair", "prompts"}


@pytest.mark.parametrize("name", NAMES)
def test_an_option_does_what_the_run_without_it_does_not(name, options, case):
    extra, base, witness = options[name]
    assert witness(Run(base | extra, case))
    without = Run(base, case)
    without.options = base | extra  # the same witness, so with the same truncation and ends in mind
    assert not witness(without)


@pytest.mark.parametrize(("one", "two"), combinations(NAMES, 2))
def test_two_options_are_both_honoured_or_refused(one, two, options, case):
    (first, _, see_first), (second, _, see_second) = options[one], options[two]
    shared = first.keys() & second.keys()
    if any(first[name] != second[name] for name in shared):
        return  # two values of one parameter
    try:
        run = Run(first | second, case)
    except sd.SpecdecError as error:
        assert (one, two) in REFUSED, error
        return
    assert (one, two) not in REFUSED
    assert see_first(run) and see_second(run)


REFUSED = {
    ("verifier", "drafts"),  # several drafts have a rule of their own
    ("batch_size", "drafts"),  # they are a batch already
    ("drafts", "lookup"),  # all drafts of a lookup are the same one
    ("confidence", "lookup"),  # a lookup has no confidence
    ("length", "min_new_tokens"),  # 5 new tokens at most, 7 at least
}
