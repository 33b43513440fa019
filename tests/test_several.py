"""Several drafts a round: the exact law, the accounting, the cache, and what cannot be combined with them."""

from collections import defaultdict
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch

import specdec_lib as sd
from specdec_lib.audit.enumeration import runs
from specdec_lib.decode.draft_length import Confidence, Heuristic
from specdec_lib.decode.verification import follow
from specdec_lib.distributions import overlap
from specdec_lib.drafters import SamplingParams
from specdec_lib.exact import Draft, distance, random_pair, target_law
from specdec_lib.models import load_model, load_transformers
from specdec_lib.models.session import open_session
from specdec_lib.studies.both_sides import disturbed
from specdec_lib.studies.trees import independent_chains, rounds
from specdec_lib.verify import VERIFIERS, multidraft

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]

# -- the law, exactly ----------------------------------------------------------------------------------


def branches(target, draft, k, prefix, gamma):
    """Every (accepted, tokens emitted) of a round of `k` drafts, with its probability."""
    law = defaultdict(float)
    for blocks in product(list(draft.blocks(prefix, gamma)), repeat=k):
        weight = float(np.prod([float(w) for w, _, _ in blocks]))
        drafts, q = [x for _, x, _ in blocks], [laws for _, _, laws in blocks]
        p = [np.stack([target.law(prefix + x[:i]) for i in range(len(x) + 1)]) for x in drafts]

        def once(generator, p=p, q=q, drafts=drafts):
            choose = lambda probs, random: generator._path.choose([float(a) for a in probs])  # noqa: E731
            with patch("specdec_lib.sampling.draw", choose):
                return follow(p, q, drafts, np.random.default_rng(0))

        for chance, (followed, n, last) in runs(once):
            law[n, (*drafts[followed][:n], last)] += weight * chance
    return law


def law_of_text(target, draft, k, gamma, length):
    """`{text: probability}` of decoding with `k` drafts a round, and the expected number of rounds."""
    done, reached, total = defaultdict(float), {(): 1.0}, 0.0
    while reached:
        prefix = min(reached, key=len)
        mass = reached.pop(prefix)
        total += mass
        for (_, new), weight in branches(target, draft, k, prefix, min(gamma, length - len(prefix) - 1)).items():
            place = done if len(prefix + new) == length else reached
            place[prefix + new] = place.get(prefix + new, 0.0) + mass * weight
    return dict(done), total


def unsure(q, token):
    return q[token] < 0.4


@pytest.mark.parametrize(("kind", "k", "stop"), [("stochastic", 2, None), ("partial", 3, None), ("partial", 2, unsure)])
def test_the_output_law_is_the_targets(kind, k, stop):
    target, small = random_pair(kind, 3, 7)
    draft = Draft(small, small, **({"stop": stop} if stop else {}))
    lengths = {len(x) for _, x, _ in draft.blocks((), 2)}
    assert lengths == ({1, 2} if stop else {2})
    expected = target_law(target, 3)
    assert distance(law_of_text(target, draft, k, 2, 3)[0], expected) < 1e-12 and len(expected) > 5


def not_updated(p, q, x):
    law, reached = [], 1
    for a, q_i in zip(x, q, strict=True):
        kept = min(1, p[a] / q_i[a])
        law.append(reached * kept)
        reached *= 1 - kept
    return [*law, reached]


WRONG = {
    "the residual is not updated between candidates": {
        "accepted": not_updated,
    },
    # https://github.com/NJUNLP/MCSD/issues/5 asks whether the last token comes from the target's own law
    "the last token comes from the target's law": {"correction": lambda p, q, x: p},
    "the last token comes from the first residual": {"correction": lambda p, q, x: multidraft.correction(p, q[:1], x)},
    # https://github.com/foundation-model-stack/fms-extras/issues/12 - the candidate is kept that the target's draw hits
    "candidates are compared with one draw": {
        "accepted": lambda p, q, x: (
            [float(p[a]) * (a not in x[:i]) for i, a in enumerate(x)] + [1 - sum(float(p[a]) for a in {*x})]
        ),
    },
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_rule_has_another_law(fault):
    target, small = random_pair("stochastic", 4, 3)
    with patch.multiple("specdec_lib.decode.verification", **WRONG[fault]):
        found, _ = law_of_text(target, Draft(small, small), 2, 2, 3)
    assert distance(found, target_law(target, 3)) > 0.005


def test_one_draft_is_the_token_rule():
    target, small = random_pair("stochastic", 3, 7)
    for weight, x, q in Draft(small, small).blocks((), 2):
        p = np.stack([target.law(x[:i]) for i in range(3)])
        found = branches(target, _Only(weight, x, q), 1, (), 2)
        for n, chance in enumerate(VERIFIERS["token"].accepted(p, q, x)):
            assert sum(w for (m, _), w in found.items() if m == n) == pytest.approx(float(weight * chance))


class _Only:
    def __init__(self, *block):
        self.block = block

    def blocks(self, prefix, gamma):
        return [self.block]


@pytest.mark.parametrize(("kind", "k"), [("stochastic", 1), ("stochastic", 2), ("partial", 3)])
def test_rounds_told_from_the_targets_texts_are_those_of_decoding(kind, k):
    target, small = random_pair(kind, 3, 7)
    expected = 0.0
    for text, weight in target_law(target, 3).items():
        p, q = (np.stack([m.law(text[:i]).astype(float) for i in range(3)]) for m in (target, small))
        expected += float(weight) * rounds(independent_chains(p, q, text, k, depth=2)).sum()
    assert expected == pytest.approx(law_of_text(target, Draft(small, small), k, 2, 3)[1], rel=1e-12)


# -- the decoder ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tiny_folder):
    """`pairs(kind, noise, **settings)`: in float64, a target and a disturbed copy of it."""

    def make(kind="llama", noise=0.5, **settings):
        folder = tiny_folder(kind, **settings)
        return sd.Pair(
            load_model(folder, "cpu", "float64"), disturbed(load_transformers(folder, "cpu", "float64"), noise)
        )

    return make


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("gamma", [4, Heuristic(3), Confidence(0.5, longest=5)])
def test_every_token_is_drawn_from_what_follows_the_text(kind, gamma, pairs):
    """The scores in the trace are the target's after the whole text: rows, positions and cache are in step."""
    pair = pairs(kind)
    out = sd.generate(
        pair, [PROMPT, [4]], gamma, 40, temperature=0.8, top_k=20, eos=[], drafts=3, seed=2, logprobs=True
    )
    for prompt, tokens, scores in zip([PROMPT, [4]], out.tokens, out.scores, strict=True):
        session = open_session(pair.target)
        logits = session.feed(torch.tensor([prompt + tokens[:-1]]), last=len(tokens))[0]
        expected = SamplingParams(0.8, top_k=20).probs(logits).log()[range(40), tokens]
        torch.testing.assert_close(torch.tensor(scores, dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)
    lengths = {len(draft) for r in out.trace for draft in r.drafts}
    assert out.stats.rescued > 0 and len(lengths) > 2
    again = sd.generate(pair, [PROMPT, [4]], gamma, 40, temperature=0.8, top_k=20, eos=[], drafts=3, seed=2)
    assert again.tokens == out.tokens


def test_identities_and_what_the_acceptance_rate_counts(pairs):
    out = sd.generate(pairs(), [PROMPT, [4], [30, 2]], 3, 60, temperature=1.0, drafts=3, seed=1)
    stats = out.stats
    assert sum(stats.histogram) == stats.rounds == stats.target_passes
    assert stats.emitted == stats.accepted + stats.rounds - stats.trimmed == sum(map(len, out.tokens))
    assert stats.drafted == sum(len(draft) for r in out.trace for draft in r.drafts) == stats.draft_passes
    for r in out.trace:
        assert r.drafted in r.drafts and len(r.drafts) == 3
        assert r.emitted[: r.kept] == r.drafted[: r.kept]
        assert len(r.p) == len(r.q) == len(r.drafted)
        first = [next(d[n] for d in r.drafts if d[:n] == r.drafted[:n]) for n in range(r.kept)]
        assert r.rescued == sum(a != b for a, b in zip(first, r.drafted, strict=False))
    assert 0 < stats.rescued < stats.kept
    assert stats.acceptance_rate == (stats.kept - stats.rescued) / (stats.kept + stats.rejected)


def test_the_acceptance_rate_is_alpha_whatever_the_number_of_drafts():
    """Exactly, in one round of one token: the first draft's token is kept with probability sum min(p, q)."""
    target, small = random_pair("stochastic", 3, 7)
    p, q = target.law(()), small.law(())
    for k in (1, 2, 3):
        first = kept = 0.0
        for drafts in product(range(3), repeat=k):
            law = multidraft.accepted(p, [q] * k, drafts)
            weight = float(np.prod([float(q[x]) for x in drafts]))
            for j, chance in enumerate(law[:-1]):
                done = sd.decode.Round(
                    0, [drafts[j]], 1, [drafts[j], 0], [], [], k, 0.0, 0.0, 0.0, drafts=[[x] for x in drafts]
                )
                kept += weight * float(chance)
                first += weight * float(chance) * sd.decode.summarise([done]).acceptance_rate
        assert first == pytest.approx(float(overlap(p, q)))
        assert (kept > first + 0.01) == (k > 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_memory_does_not_grow_with_refused_tokens(kind, pairs):
    opened, widest = [], []

    def spy(*args):
        opened.append(open_session(*args))
        return opened[-1]

    def look(done):
        batch = opened[-1]
        keys = batch.cache.keys[0] if kind == "llama" else batch.cache.layers[0].keys
        widest.append((keys.shape[0], keys.shape[2] - max(batch.lengths)))

    with patch("specdec_lib.decode.loop.open_session", spy):
        out = sd.generate(pairs(kind), PROMPT, 5, 120, temperature=1.0, eos=[], drafts=3, on_round=look)
    assert out.stats.drafted > 5 * 120
    assert {rows for rows, _ in widest} == {3}
    if kind == "llama":
        assert opened[-1].cache.capacity == len(PROMPT) + 120
    else:
        assert max(extra for _, extra in widest) < 30


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_row_can_be_repeated_and_repeated_again(kind, tiny_folder):
    model = load_transformers(tiny_folder(kind), "cpu", "float64")
    run = open_session(load_model(tiny_folder(kind), "cpu", "float64"), 1)
    text = [5, 9, 17]
    run.feed_rows([text], [0])
    run.select_rows([0, 0, 0])
    for winner, new in ((2, [[1, 2], [], [3, 4, 5]]), (0, [[7], [8, 9, 6], [4]]), (1, [[3, 3], [6, 6, 6, 6], []])):
        found = run.feed_rows(new, [len(row) for row in new])
        for row, logits in zip(new, found, strict=True):
            if row:
                with torch.no_grad():
                    expected = model(torch.tensor([text + row])).logits[0, -len(row) :]
                torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        run.select_rows([winner] * 3)
        text = text + new[winner][:1]
        run.rollback([len(text)] * 3)
        assert run.lengths == [len(text)] * 3


# -- what is refused -----------------------------------------------------------------------------------

LOOKUP = sd.PromptLookupDrafter()


@pytest.mark.parametrize(
    ("options", "draft", "message"),
    [
        ({"drafts": 0}, None, "drafts must be a whole number >= 1, got 0"),
        ({"temperature": 0.0}, None, "at temperature 0 all drafts are equal"),
        ({"verifier": "block"}, None, "several drafts are verified by a rule of their own, not by 'block'"),
        ({"batch_size": 2}, None, "leave out batch_size or drafts"),
        ({}, sd.EarlyExitDrafter(1), "EarlyExitDrafter drafts in the target's own session"),
        ({}, LOOKUP, "PromptLookupDrafter is deterministic"),
        ({}, sd.NGramDrafter.fit([[1, 2, 3]]), "NGramDrafter is deterministic"),
        ({}, sd.ComposedDrafter([LOOKUP, LOOKUP]), "ComposedDrafter is deterministic"),
    ],
)
def test_what_several_drafts_cannot_be_combined_with(options, draft, message, pairs):
    pair = pairs()
    pair = sd.Pair(pair.target, draft or pair.draft)
    with pytest.raises(sd.SpecdecError, match=message):
        sd.generate(pair, PROMPT, max_new_tokens=4, **{"temperature": 1.0, "drafts": 2} | options)


def test_lookup_before_a_model_goes_together_with_several_drafts(pairs):
    """Where lookup has a draft all are equal, and exact as point masses; elsewhere the model draws each."""
    pair = pairs()
    composed = sd.ComposedDrafter([sd.PromptLookupDrafter(min_ngram=2), sd.ModelDrafter(pair.draft)])
    out = sd.generate(sd.Pair(pair.target, composed), PROMPT * 2, 3, 40, temperature=1.0, eos=[], drafts=2)
    equal = [r.drafts[0] == r.drafts[1] for r in out.trace if r.drafted]
    assert any(equal) and not all(equal)
