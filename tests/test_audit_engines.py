"""Engines as samplers, on models of six tokens whose laws are enumerated: ours, transformers', and an adapter's.

A text takes some 10 ms, so the sizes are small: a few hundred samples, large effects (0.3).
"""

import re
from pathlib import Path

import pytest
import torch
from tiny import tiny_feature_draft
from transformers import GenerationConfig

from specdec_lib import SpecdecError, generate, generate_plain
from specdec_lib.audit import adapters
from specdec_lib.audit.audit import audit
from specdec_lib.audit.memoize import MemoizedModel, memoized
from specdec_lib.drafters import (
    ComposedDrafter,
    EarlyExitDrafter,
    FeatureDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SamplingParams,
)
from specdec_lib.exact import distance, output_law, random_pair, target_law
from specdec_lib.models import Pair, load_model, load_transformers, open_session
from specdec_lib.models.pair import fast
from specdec_lib.verify.lossy import ensemble
from specdec_lib.verify.mutants import MUTANTS

README = Path(__file__).resolve().parents[1] / "README.md"
PROMPT, LENGTH, END = [1, 2, 3, 1, 2], 3, 0
QUICK = {"effect": 0.3, "level": 1e-3, "power": 0.9}


@pytest.fixture(scope="module")
def six(tiny_folder):
    """Target, draft, the target's tabular law and that of its blocks, small outcomes grouped to save samples."""
    target, draft = (load_transformers(tiny_folder("llama", seed=s, vocab_size=6), device="cpu") for s in (0, 1))
    table = adapters.tabular(target, PROMPT, end=END)
    return target, draft, table, adapters.BlockLaw(table, LENGTH, floor=0.03)


def test_block_law(six):
    target, _, table, grouped = six
    whole = adapters.BlockLaw(table, LENGTH)
    assert whole.rest == 0
    assert float(distance(whole.law, target_law(table, LENGTH))) < 1e-12
    assert grouped.grouped(whole.law) == pytest.approx(grouped.law)
    half = adapters.tabular(target, PROMPT, SamplingParams(0.5))
    expected = table.law(()) ** 2 / (table.law(()) ** 2).sum()
    assert half.law(()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("floor", "message"),
    [(1.0, r"floor must lie in \[0, 1\)"), (-0.1, r"floor must lie in \[0, 1\)"), (0.9, "nothing is left to test")],
)
def test_a_floor_that_leaves_nothing_to_test_is_refused(floor, message, six):
    with pytest.raises(SpecdecError, match=message):
        adapters.BlockLaw(six[2], LENGTH, floor)


def test_our_decoder(six, tiny_folder):
    target, draft, _, block = six
    fast = load_model(tiny_folder("llama", seed=0, vocab_size=6), device="cpu")
    right = adapters.ours(Pair(fast, draft), PROMPT, LENGTH, end=END)
    assert audit(block.of(right), block.law, **QUICK).exit_status == 0
    together = adapters.ours(Pair(fast, draft), PROMPT, LENGTH, gamma=2, end=END, batch_size=8)
    assert audit(block.of(together), block.law, **QUICK).exit_status == 0
    wrong = adapters.ours(Pair(target, draft), PROMPT, LENGTH, end=END, verifier=ensemble(0.3, "target"))
    assert audit(block.of(wrong), block.law, **QUICK).exit_status == 1


@pytest.mark.parametrize(
    "how",
    [{}, {"assistant": True}, {"assistant": True, "threshold": None}, {"prompt_lookup_num_tokens": 2}],
    ids=["plain", "assistant", "assistant, default threshold", "prompt lookup"],
)
def test_transformers_keeps_the_law(how, six):
    target, draft, _, block = six
    how = how | {"assistant": draft if "assistant" in how else None}
    before = draft.generation_config.to_dict()
    sampler = adapters.transformers(target, PROMPT, LENGTH, end=END, **how)
    assert audit(block.of(sampler), block.law, **QUICK).exit_status == 0
    assert draft.generation_config.to_dict() == before


@pytest.mark.skipif(
    not hasattr(GenerationConfig(), "assistant_ensemble_weight"), reason="this transformers has no ensemble"
)
def test_transformers_ensemble_is_flagged_and_follows_the_law_that_we_compute(six):
    """Neither the target nor the mixture: with two draft tokens the third is the bonus, which comes from the target."""
    target, draft, table, block = six
    sampler = adapters.transformers(target, PROMPT, LENGTH, draft, gamma=2, end=END, assistant_ensemble_weight=0.3)
    other = adapters.tabular(draft, PROMPT, end=END)
    laws = [output_law(ensemble(0.3, bonus), table, other, 2, LENGTH, cap=True) for bonus in ("mixture", "target")]
    mixture, code = (block.grouped(law.sequences) for law in laws)
    found = [audit(block.of(sampler), law, **QUICK).exit_status for law in (block.law, mixture, code)]
    assert found == [1, 1, 0]


def test_a_wrong_temperature_is_found(six):
    target, _, _, block = six
    sampler = adapters.transformers(target, PROMPT, LENGTH, end=END, temperature=0.5)
    assert audit(block.of(sampler), block.law, **QUICK).exit_status == 1


def test_random_pairs_through_a_rule_keep_the_law():
    """The rule sampler itself, against the exact room: same target, rounds cut at the length."""
    target, draft = random_pair("stochastic", 3, 7)
    copy = lambda p, q, x, rng: [rng.choice(3, p=p[0])]  # noqa: E731 - plain decoding, one token a round
    verdict = audit(adapters.of_rule(copy, target, draft, gamma=1, length=2), target_law(target, 2), effect=0.1)
    assert verdict.exit_status == 0


def test_of_the_first_token_alone_something_is_drafted_and_tested(six):
    """One new token leaves no room for a draft, so more are decoded than are looked at."""
    target, draft, table, _ = six
    first = adapters.BlockLaw(table, 1)
    for rule, found in (("token", 0), (MUTANTS["everything accepted"].rule, 1)):
        sampler = adapters.ours(Pair(target, draft), PROMPT, 1, verifier=rule)
        assert audit(first.of(sampler), first.law, **QUICK).exit_status == found
    blind = adapters.transformers(target, PROMPT, 1, draft)
    assert all(len(tokens) == 1 for tokens in blind(3, 0))


# -- a model that remembers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(tiny_folder):
    target, draft = (load_model(tiny_folder("llama", seed=s), device="cpu") for s in (0, 1))
    return Pair(target, draft)


def test_a_remembered_model_gives_the_logits_of_the_model(larger):
    """Fed in parts, rolled back, fed again with something else: as a session of the model itself does."""
    known = MemoizedModel(larger.target)
    steps = [(0, [1, 2, 3, 4], 0), (4, [5, 6, 7], 3), (5, [8, 9], 2), (6, [8, 10], 1), (4, [5, 6, 7], 3)]
    for _ in range(2):
        plain, session = open_session(larger.target), open_session(known)
        for length, ids, last in steps:
            plain.rollback(length)
            session.rollback(length)
            expected, found = (s.feed(torch.tensor([ids]), last) for s in (plain, session))
            assert found.shape == expected.shape and session.length == plain.length
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert known.passes == 3  # the first step asks for nothing, the last one for what is known; so does the second turn


def test_a_remembered_pair_writes_what_the_pair_writes(larger):
    quick = memoized(larger)
    for seed in range(5):
        for temperature in (0.0, 1.0):
            options = {"gamma": 3, "max_new_tokens": 12, "temperature": temperature, "seed": seed, "eos": []}
            texts = generate(larger, [[1, 2, 3], [4, 5]], **options).tokens
            assert generate(quick, [[1, 2, 3], [4, 5]], **options).tokens == texts
    before = quick.target.passes
    generate(quick, [[1, 2, 3], [4, 5]], **options)
    assert quick.target.passes == before
    assert generate_plain(quick, [1, 2, 3], 8).tokens == generate_plain(larger, [1, 2, 3], 8).tokens


def test_the_model_behind_a_lookup_is_remembered_too(larger):
    composed = ComposedDrafter([PromptLookupDrafter(min_ngram=2), ModelDrafter(larger.draft)], [None, 2])
    pair = Pair(larger.target, composed)
    quick = memoized(pair)
    options = {"gamma": 3, "max_new_tokens": 12, "temperature": 1.0, "eos": []}
    texts = generate(pair, [1, 2, 3], **options).tokens
    assert generate(quick, [1, 2, 3], **options).tokens == texts
    known = quick.draft.drafters[1].model
    before = known.passes
    assert before > 0 and quick.draft.limits == [None, 2]
    generate(quick, [1, 2, 3], **options)
    assert known.passes == before


def test_what_is_remembered_has_a_limit(larger, monkeypatch):
    monkeypatch.setattr("specdec_lib.audit.memoize.MOST_LOGITS", 10 * larger.target.config.vocab_size)
    quick = memoized(larger)
    options = {"gamma": 3, "max_new_tokens": 30, "temperature": 1.0, "eos": []}
    assert generate(quick, [1, 2, 3], **options).tokens == generate(larger, [1, 2, 3], **options).tokens
    assert len(quick.target._known) <= 10


@pytest.mark.parametrize("prefixes", [10, 1000])
def test_the_states_that_a_draft_reads_are_remembered_too(prefixes, tiny_folder, monkeypatch):
    """Behind a lookup, so that not every round reads them; also where what is remembered must be forgotten."""
    model = load_transformers(tiny_folder("llama"), "cpu", "float32")
    reader = FeatureDrafter(tiny_feature_draft(model).float())
    pair = Pair(fast(model), ComposedDrafter([PromptLookupDrafter(min_ngram=2), reader], [None, 2]))
    monkeypatch.setattr("specdec_lib.audit.memoize.MOST_LOGITS", prefixes * model.config.vocab_size)
    quick = memoized(pair)
    options = {"gamma": 3, "max_new_tokens": 24, "temperature": 1.0, "eos": []}
    for seed in (0, 1, 0):
        before = quick.target.passes
        texts = generate(quick, [[1, 2, 3], [4, 5]], seed=seed, **options).tokens
        assert texts == generate(pair, [[1, 2, 3], [4, 5]], seed=seed, **options).tokens
    assert (quick.target.passes == before) == (prefixes == 1000)


def test_an_early_exit_drafts_in_a_remembered_model(tiny_folder, monkeypatch):
    """Alone and behind a lookup; also where what is remembered must be forgotten."""
    target = load_model(tiny_folder("llama"), device="cpu")
    options = {"gamma": 3, "max_new_tokens": 24, "temperature": 1.0, "eos": []}
    for prefixes in (10, 1000):
        monkeypatch.setattr("specdec_lib.audit.memoize.MOST_LOGITS", prefixes * target.config.vocab_size)
        for draft in (EarlyExitDrafter(1), ComposedDrafter([PromptLookupDrafter(min_ngram=2), EarlyExitDrafter(1)])):
            pair = Pair(target, draft)
            quick = memoized(pair)
            for seed in (0, 1, 0):
                before = quick.target.passes
                found, expected = (generate(p, [[1, 2, 3], [4, 5]], seed=seed, **options) for p in (quick, pair))
                assert found.tokens == expected.tokens and found.stats.accepted == expected.stats.accepted > 0
            assert (quick.target.passes == before) == (prefixes == 1000)


def test_a_remembered_model_has_what_the_model_has(larger, tiny_folder):
    known = MemoizedModel(larger.target)
    for name in vars(larger.target):
        getattr(known, name)
    other = load_transformers(tiny_folder("gpt2"), "cpu")
    reader = FeatureDrafter(tiny_feature_draft(load_transformers(tiny_folder("llama"), "cpu")))
    for draft in (EarlyExitDrafter(1), reader):
        with pytest.raises(SpecdecError, match="needs a target that runs as FastLlama"):
            generate(memoized(Pair(other, draft)), [1, 2, 3], 2)


# -- an adapter of one's own ---------------------------------------------------------------------------


def test_the_adapter_of_the_readme_runs_and_finds_a_fault(six, capsys):
    """The README's ten lines, with an engine that keeps the law and with one that does not."""
    target = six[0]
    (code,) = re.findall(r"```python\n((?:(?!```).)*?def my_decoder.*?)```", README.read_text(), re.DOTALL)

    class Engine:
        def __init__(self, **settings):
            self.settings = settings

        def generate(self, prompt, max_new_tokens):
            ids = torch.tensor([prompt])
            out = target.generate(
                ids, do_sample=True, top_k=0, max_new_tokens=max_new_tokens, pad_token_id=0,
                attention_mask=torch.ones_like(ids), eos_token_id=None, **self.settings,
            )  # fmt: skip
            return out[0, len(prompt) :].tolist()

    for engine, verdict in ((Engine(), "no deviation above"), (Engine(temperature=0.3), "deviation found")):
        exec(code.replace("effect=0.05", "effect=0.3"), {"model": target, "prompt": PROMPT, "engine": engine})
        assert capsys.readouterr().out.startswith(verdict)
