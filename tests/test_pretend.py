"""The decoder and all that computes with models, on the pretend accelerator of `pretend.py`.

The device itself first: what it refuses and what it counts, by known counts.  Then the decoder: on the device it
writes the CPU's text, token for token, greedily and at a fixed seed, and nothing on its way is on the wrong device.

Eight kinds of target, eight drafters, five ways to sample, five rules, one text or several of unequal length, five
kinds of options and three places for target and draft are 48,000 combinations, of which some have no meaning
(`can_be`).  `covering` chooses of the others one after the other the combination with the most pairs of values that
none before it had, until every pair that can be met has been met: faults of this kind need two to meet.  It is an
algorithm without chance, so that the same combinations are run each time.

At the end the waits of a round: the device counts them, and the table says how many are allowed.
"""

import copy
import shutil
import sys
from functools import cache
from itertools import combinations, product
from pathlib import Path
from random import Random

import numpy as np
import pretend
import pytest
import torch
from pretend import DEVICE
from safetensors.torch import load_file
from tiny import tiny_feature_draft, tiny_model, tiny_tokenizer
from transformers import RepetitionPenaltyLogitsProcessor

import specdec_lib as sd
from specdec_lib.audit.memoize import memoized
from specdec_lib.bench.costs import CostMeter, pass_seconds
from specdec_lib.distill import features
from specdec_lib.distill.recipe import distill, prepare, write_text
from specdec_lib.distill.text import write_shard
from specdec_lib.drafters import SamplingParams
from specdec_lib.models import load_model, open_session
from specdec_lib.models.pair import fast
from specdec_lib.studies.both_sides import disturbed
from specdec_lib.studies.trees import confident
from specdec_lib.verify.lossy import ensemble, lenience, lenience_greedy

sys.path.insert(0, str(Path(__file__).parent / "distill"))
from small_job import Quiet, a_job

pytestmark = pytest.mark.skipif(bool(pretend.REASON), reason=pretend.REASON)

GAMMA, NEW = 3, 10


@pytest.fixture
def count():
    with pretend.pretend() as counts:
        yield counts


# -- the device ----------------------------------------------------------------------------------------

WAITS, SENT, BLOCKING = "waits", "copies to the device", "blocking copies"
KNOWN = {
    "item": (lambda x, i: x[0].item(), {WAITS: 1}),
    "float": (lambda x, i: float(x[0]), {WAITS: 1}),
    "bool": (lambda x, i: bool(x[0] > 0), {WAITS: 1}),
    "tolist": (lambda x, i: x.tolist(), {WAITS: 1}),
    "tolist of a number": (lambda x, i: x[0].tolist(), {WAITS: 1}),
    "index of a list": (lambda x, i: [5, 6, 7][i[0]], {WAITS: 1}),
    "number as an index": (lambda x, i: x[i[0]], {WAITS: 1}),
    "number in a slice": (lambda x, i: x[: i[1]], {WAITS: 1}),
    "in a list": (lambda x, i: i[0] in [7, 0], {WAITS: 2}),
    "equal": (lambda x, i: torch.equal(x, x), {WAITS: 1}),
    "allclose": (lambda x, i: torch.allclose(x, x), {WAITS: 1}),
    "nonzero": (lambda x, i: x.nonzero(), {WAITS: 1}),
    "unique": (lambda x, i: x.unique(), {WAITS: 1}),
    "bincount": (lambda x, i: i.bincount(), {WAITS: 1}),
    "mask as an index": (lambda x, i: x[x > 1], {WAITS: 1}),
    "number through a mask": (lambda x, i: x.__setitem__(x > 1, 0.0), {}),
    "tensor through a mask": (lambda x, i: x.__setitem__(x > 1, x[:1]), {WAITS: 1}),
    "cpu": (lambda x, i: x.cpu(), {WAITS: 1}),
    "to the CPU in float64": (lambda x, i: x.to("cpu", torch.float64), {WAITS: 1}),
    "into a tensor of the CPU's": (lambda x, i: torch.zeros(3).copy_(x), {WAITS: 1}),
    "tensor": (lambda x, i: torch.tensor([1, 2], device=DEVICE), {SENT: 1, BLOCKING: 1}),
    "as_tensor": (lambda x, i: torch.as_tensor(np.ones(2), device=DEVICE), {SENT: 1, BLOCKING: 1}),
    "to the device": (lambda x, i: torch.ones(2).to(DEVICE), {SENT: 1, BLOCKING: 1}),
    "to the device, not waiting": (lambda x, i: torch.ones(2).to(DEVICE, non_blocking=True), {SENT: 1}),
    "into a tensor of the device's": (lambda x, i: x.copy_(torch.ones(3)), {SENT: 1, BLOCKING: 1}),
    "part of it": (lambda x, i: x[:2].copy_(torch.ones(2), non_blocking=True), {SENT: 1}),
    "CPU tensor as an index": (lambda x, i: x[torch.tensor([0, 2])], {SENT: 1, BLOCKING: 1}),
    "tensor as an index": (lambda x, i: x[i], {}),
    "range": (lambda x, i: torch.arange(3, device=DEVICE), {}),
    "another dtype": (lambda x, i: x.double(), {}),
    "sort and search": (lambda x, i: torch.searchsorted(x.sort().values.cumsum(-1), 2.5), {}),
    "CPU number": (lambda x, i: x + torch.tensor(1.0), {}),
    "CPU number where": (lambda x, i: torch.where(x > 1, x, torch.tensor(0.0)), {}),
    "CPU number as a filling": (lambda x, i: x.masked_fill(x > 1, torch.tensor(0.0)), {}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_counted(name, count):
    what, expected = KNOWN[name]
    x, i = torch.tensor([1.0, 2.0, 3.0], device=DEVICE), torch.tensor([0, 2], device=DEVICE)
    count.clear()
    what(x, i)
    assert {key: n for key, n in count.items() if n and key != "operations"} == expected
    assert count["operations"] >= 1


REFUSED = {
    "two devices": lambda x, i: x + torch.ones(3),
    "a CPU tensor and a number of the device's": lambda x, i: torch.ones(3) + x[0],
    "two CPU numbers": lambda x, i: torch.where(x > 1, torch.tensor(1.0), torch.tensor(0.0)),
    "written to a CPU number": lambda x, i: torch.tensor(1.0).add_(x[0]),
    "joined": lambda x, i: torch.cat([x, torch.ones(1)]),
    "stacked numbers": lambda x, i: torch.stack([x[0], torch.tensor(1.0)]),
    "gathered": lambda x, i: x.gather(0, torch.tensor([1])),
    "searched": lambda x, i: torch.searchsorted(x, torch.tensor([1.0])),
    "embedded": lambda x, i: torch.nn.functional.embedding(torch.tensor([0]), x[:, None]),
    "a CPU tensor indexed": lambda x, i: torch.ones(3)[i],
    "CPU values at places": lambda x, i: x.__setitem__(i, torch.ones(2)),
    "random numbers of the CPU's": lambda x, i: torch.rand(3, device=DEVICE, generator=torch.Generator()),
    "random tokens of the CPU's": lambda x, i: torch.multinomial(x, 1, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, count):
    x, i = torch.tensor([1.0, 2.0, 3.0], device=DEVICE), torch.tensor([0, 2], device=DEVICE)
    with pytest.raises(RuntimeError, match=r"same device|device type for generator"):
        REFUSED[name](x, i)


def test_numpy_does_not_see_the_device(count):
    x = torch.ones(3, device=DEVICE)
    for look in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array([x, x])):
        with pytest.raises(TypeError, match=r"use Tensor\.cpu\(\)|Use Tensor\.cpu\(\)"):
            look()
    assert x.cpu().numpy().tolist() == [1, 1, 1]


def test_a_step_of_training_is_the_cpus(count):
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    there = copy.deepcopy(here).to(DEVICE)
    assert count[SENT] == 4
    x = torch.randn(5, 3, dtype=torch.float64)
    for model, given in ((here, x), (there, x.to(DEVICE))):
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            model(given).square().mean().backward()
            optimiser.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert b.device.type == pretend.NAME
        torch.testing.assert_close(b.cpu(), a)


def test_outside_there_is_no_accelerator():
    with pretend.pretend():
        assert torch.accelerator.is_available()
    assert not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type != pretend.NAME


# -- the decoder ---------------------------------------------------------------------------------------

TARGETS = ("llama", "qwen2", "gpt2", "gemma", "gemma2", "mistral", "t5", "fast")
DRAFTERS = ("model", "ngram", "lookup", "composed", "early", "features", "shared", "text")
WAYS = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 8},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
}
RULES = ("token", "block", "lenience", "ensemble", "several")
ROWS = {"one": [[5, 9, 17, 3]], "ragged": [[5, 9, 17, 3, 8, 30], [4], [7, 9, 12]]}
OPTIONS = ("none", "processors", "criteria", "stop", "logprobs")
PLACES = ("both", "target", "draft")
FACTORS = (TARGETS, DRAFTERS, tuple(WAYS), RULES, tuple(ROWS), OPTIONS, PLACES)


def can_be(target, drafter, way, rule, rows, options, place):
    """Whether `generate` takes this combination, and a draft is somewhere where it says so."""
    if drafter in ("early", "features") and target != "fast":
        return False
    if drafter in ("shared", "text") and target == "t5":
        return False
    if drafter in ("ngram", "lookup", "early") and place != "both":  # no weights of their own
        return False
    if drafter == "early" and rows != "one":
        return False
    several = way != "greedy" and rows == "one" and drafter in ("model", "composed", "features", "shared")
    return rule != "several" or several


def covering(factors, valid):
    """Combinations that meet every pair of values of two factors that a valid one can meet; see above."""
    chosen = np.array([c for c in product(*map(range, map(len, factors))) if valid(*named(factors, c))])
    size = max(map(len, factors))
    met = np.stack(
        [
            (k * size + chosen[:, a]) * size + chosen[:, b]
            for k, (a, b) in enumerate(combinations(range(len(factors)), 2))
        ],
        axis=1,
    )
    missing = np.zeros(met.max() + 1, bool)
    missing[met] = True
    while missing.any():
        best = int(missing[met].sum(1).argmax())
        missing[met[best]] = False
        yield named(factors, chosen[best])


def named(factors, numbers):
    return tuple(values[i] for values, i in zip(factors, numbers, strict=True))


CASES = list(covering(FACTORS, can_be))


def test_every_pair_that_can_be_is_run():
    def pairs(case):
        return set(combinations(enumerate(case), 2))

    possible = set().union(*(pairs(case) for case in product(*FACTORS) if can_be(*case)))
    assert possible == set().union(*map(pairs, CASES))
    assert {value for case in CASES for value in case} == {value for values in FACTORS for value in values}
    assert all(can_be(*case) for case in CASES) and len(CASES) == len(set(CASES)) < 120


TOKENIZER = tiny_tokenizer("llama")


@cache
def model(kind, seed, noise=0.0):
    """A tiny model on the CPU in float64, where rounding decides nothing."""
    made = tiny_model("llama" if kind == "fast" else kind, TOKENIZER, seed, {}).double()
    return disturbed(made, noise) if noise else made


@cache
def there(kind, seed, noise=0.0):
    with pretend.pretend():
        return copy.deepcopy(model(kind, seed, noise)).to(DEVICE)


def placed(on_device, *which):
    return (there if on_device else model)(*which)


def a_pair(target, drafter, target_there=False, draft_there=False):
    whole = placed(target_there, target, 0)
    if target == "fast":
        whole = fast(whole)
    return sd.Pair(whole, a_drafter(drafter, target, draft_there), TOKENIZER)


def a_drafter(name, target, on_device):
    other = "llama" if target == "t5" else target
    if name == "model":
        return placed(on_device, target, 0, 0.3)
    if name == "ngram":
        return sd.NGramDrafter.fit([np.random.default_rng(0).integers(2, 40, 400).tolist()])
    if name == "lookup":
        return sd.PromptLookupDrafter(min_ngram=1)
    if name == "composed":
        lookup, drawn = sd.PromptLookupDrafter(min_ngram=2), a_drafter("model", target, on_device)
        return sd.ComposedDrafter([lookup, sd.ModelDrafter(drawn)], [None, 2])
    if name == "early":
        return sd.EarlyExitDrafter(1)
    if name == "features":
        draft = tiny_feature_draft(model("fast", 0))
        return sd.FeatureDrafter(draft.to(DEVICE) if on_device else draft)
    kinds = {"shared": sd.SharedVocabularyDrafter, "text": sd.TextDrafter}
    return kinds[name](placed(on_device, other, 0, 0.3), tiny_tokenizer("gemma"), TOKENIZER)


def asked_for(drafter, way, rule, rows, options):
    """The prompts and the arguments of `generate`."""
    given = {"max_new_tokens": NEW, "seed": 3, **WAYS[way]}
    greedy = way == "greedy"
    certain = drafter in ("ngram", "lookup", "text")  # these may have nothing to propose, so no law to mix
    rules = {"block": "block", "lenience": lenience_greedy(0.5) if greedy else lenience(0.5)}
    rules["ensemble"] = ensemble(0.5, "none" if certain or drafter in ("shared", "features") else "mixture")
    given["verifier"] = rules.get(rule, "token")
    given["drafts"] = 2 if rule == "several" else 1
    given["batch_size"] = len(ROWS[rows])
    given |= {
        "none": {"eos": []},
        "processors": {"processors": [RepetitionPenaltyLogitsProcessor(1.3)], "min_new_tokens": 4},
        "criteria": {"criteria": [lambda ids, scores: (ids[:, -1] % 7 == 3).all()]},
        "stop": {"stop": ["a", "th"]},
        "logprobs": {"logprobs": True, "eos": []},
    }[options]
    return ROWS[rows], given


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_device_writes_the_cpus_text(case, count):
    target, drafter, way, rule, rows, options, place = case
    prompts, given = asked_for(drafter, way, rule, rows, options)
    expected = sd.generate(a_pair(target, drafter), prompts, GAMMA, **given)
    pair = a_pair(target, drafter, place != "draft", place != "target")
    count.clear()
    found = sd.generate(pair, prompts, GAMMA, **given)
    assert found.tokens == expected.tokens and found.texts == expected.texts
    assert [r.drafted for r in found.trace] == [r.drafted for r in expected.trace]
    assert count["operations"] > 0
    if options == "logprobs":
        for a, b in zip(found.logprobs + found.scores, expected.logprobs + expected.scores, strict=True):
            assert a == pytest.approx(b, abs=1e-9)


@pytest.mark.parametrize("target", TARGETS)
def test_plain_decoding_writes_the_cpus_text(target, count):
    for way, rows in (("greedy", "ragged"), ("top_p", "one")):
        options = {"max_new_tokens": NEW, "batch_size": len(ROWS[rows]), **WAYS[way]}
        expected = sd.generate_plain(a_pair(target, "lookup"), ROWS[rows], **options)
        assert sd.generate_plain(a_pair(target, "lookup", True), ROWS[rows], **options).tokens == expected.tokens


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_a_planted_fault_is_found(drafter, count):
    """A processor whose own numbers stay on the CPU: fine beside a target there, and nowhere else."""
    options = {"max_new_tokens": NEW, "processors": lambda ids, scores: scores + torch.zeros(scores.shape[-1])}
    assert sd.generate(a_pair("llama", drafter), ROWS["one"], GAMMA, **options).tokens
    with pytest.raises(RuntimeError, match="same device"):
        sd.generate(a_pair("llama", drafter, True, True), ROWS["one"], GAMMA, **options)


# -- what else computes with models ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tiny_folder, tmp_path_factory):
    """A distillation whose text was written on the CPU."""
    folder = tmp_path_factory.mktemp("written")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "who are you?", "kind": "a"}\n')
    target = tiny_folder("llama", seed=2)

    def job(out, **changes):
        shutil.rmtree(folder / "text" / "runs", ignore_errors=True)  # no run goes on from the one before
        usual = {"passes": 1, "max_new_tokens": 8, "work": folder / "text", "rows": 6, "length": 64, "batch": 6}
        usual |= {"tokens": 3 * 6 * 64}
        return a_job(folder / out, target, prompts, **usual | changes)

    write_text(prepare(job("draft")), Quiet())
    return job


@pytest.mark.parametrize("kind", ["model", "features", "tokenizer", "ngram"])
def test_a_draft_is_made(kind, written, count):
    """The whole of it: training, evaluation and benchmark; from the CPU's text, so it learns what it learns there."""
    changes = {"kind": kind, "shortlist": 300 if kind == "tokenizer" else 24}
    found = distill(written(f"{kind}-there", device=DEVICE, **changes), Quiet())
    expected = distill(written(f"{kind}-here", **changes), Quiet())
    assert found["benchmark"]["tokens"]["greedy"] > 0  # the target's text in bfloat16
    assert count["operations"] > 100
    if kind == "ngram":
        assert found["trials"] == expected["trials"]
    else:
        assert found["training"]["device"] == DEVICE
        last, other = (one["training"]["curve"][-1] for one in (found, expected))
        assert last["tokens"] == other["tokens"] and last["loss"] == pytest.approx(other["loss"], abs=1e-3)


def test_the_targets_text_and_states_are_the_cpus(tmp_path, tiny_folder, count):
    target = tiny_folder("llama", seed=2)
    shards = []
    for device in ("cpu", DEVICE):
        session = open_session(load_model(target, device, "float32"), 4, 24)
        path = tmp_path / f"text-{len(shards):05}.safetensors"
        write_shard(session, TOKENIZER, path, seed=1, index=0, rows=4, length=24)
        features.write_features(str(target), [path], [1, 2], device, "float32")
        shards.append(load_file(path) | load_file(features.file_of(path)))
    assert shards[0].keys() == shards[1].keys() >= {"tokens", "features"}
    assert torch.equal(shards[0]["tokens"].long(), shards[1]["tokens"].long())
    torch.testing.assert_close(shards[0]["features"], shards[1]["features"], rtol=0.02, atol=0.02)  # bfloat16


@pytest.mark.parametrize("drafter", ["model", "features", "early", "lookup"])
def test_the_cost_meter_waits_for_the_device_before_it_reads_the_clock(drafter, count):
    pair = a_pair("fast", drafter, True, True)
    options = {"max_new_tokens": 8, "eos": []}
    plain, drafted = sd.generate_plain(pair, ROWS["one"], **options), sd.generate(pair, ROWS["one"], GAMMA, **options)
    meter = CostMeter(pair, GAMMA, SamplingParams(1.0), longest=4)
    meter.measure(ROWS["one"][0], plain.tokens[0])
    assert meter.costs(plain.trace, drafted.trace).target_pass.value > 0
    session = open_session(pair.target)
    session.feed(torch.tensor(ROWS["one"], device=DEVICE), last=0)
    count.clear()
    pass_seconds(session, [1, 2, 3], Random(0))
    assert count[WAITS] == 6  # before and after each pass


@pytest.mark.parametrize("drafter", ["model", "features", "composed"])
def test_remembered_models_write_what_models_write(drafter, count):
    pair = a_pair("fast", drafter, True, drafter != "composed")
    quick = memoized(pair)
    for options in (WAYS["greedy"], WAYS["top_p"], WAYS["top_p"]):
        expected = sd.generate(pair, ROWS["one"], GAMMA, 8, **options).tokens
        assert sd.generate(quick, ROWS["one"], GAMMA, 8, **options).tokens == expected


def test_a_confident_tree_is_the_cpus(count):
    grown = [
        confident(open_session(placed(where, "llama", 0)), ROWS["one"][0], [3, 8, 30], nodes=8)
        for where in (False, True)
    ]
    assert grown[0] == grown[1]


# -- waits -----------------------------------------------------------------------------------------------

LIMIT = {"greedy": 2, "top_p": 3}  # per round, whatever gamma is and however many rows; goals of DESIGN's GPU path
WAITING = {
    (drafter, "token", way, rows): most
    for drafter in DRAFTERS
    for way, most in LIMIT.items()
    for rows in (1, 3)
    if not (drafter == "early" and rows > 1)
} | {
    ("model", "block", "top_p", 1): 3,
    ("model", "block", "top_p", 3): 3,
    ("model", "lenience", "top_p", 3): 3,
    ("model", "ensemble", "top_p", 3): 3,
}
TEXTS = [[5, 9, 17, 3, 8, 30], [4, 21], [7, 9, 12]]


def waits_of_rounds(drafter, rule, way, rows, gamma, count):
    """Waits and rounds that the longer of two runs has more than the shorter one.

    Draft models run as `FastLlama`: transformers' own models look at the mask of rows of different length, which is one
    more wait a pass.
    """
    target, quick = fast(there("fast", 0)), fast(there("fast", 0, 0.3))
    own = {
        "model": quick,
        "composed": sd.ComposedDrafter([sd.PromptLookupDrafter(min_ngram=2), sd.ModelDrafter(quick)], [None, 2]),
        "text": sd.TextDrafter(quick, tiny_tokenizer("gemma"), TOKENIZER),
    }
    pair = sd.Pair(target, own[drafter] if drafter in own else a_drafter(drafter, "fast", True), TOKENIZER)
    _, given = asked_for(drafter, way, rule, "one", "none")
    given["batch_size"] = rows
    found = []
    for new in (4, 12):
        count.clear()
        out = sd.generate(pair, TEXTS[:rows], gamma, **given | {"max_new_tokens": new})
        found.append((count[WAITS], max(sum(r.row == row for r in out.trace) for row in range(rows))))
    (fewer, short), (more, long) = found
    assert long > short
    return more - fewer, long - short


@pytest.mark.parametrize("case", WAITING, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("gamma", [2, 5])
def test_a_round_waits_no_more_than_so_often(case, gamma, count):
    most = WAITING[case]
    waits, rounds = waits_of_rounds(*case, gamma, count)
    assert 0 < waits <= most * rounds + most - 1  # the last round of the shorter run may have had nothing to draft


def all_kept(way, rows, gamma, count, what):
    """Per round, exactly, of a draft that is the target itself: all rounds are alike, and of full length."""
    pair = sd.Pair(fast(there("fast", 0)), fast(there("fast", 0)))
    found = []
    for rounds in (2, 4):
        count.clear()
        new = rounds * (gamma + 1)
        out = sd.generate(pair, TEXTS[:rows], gamma, new, **WAYS[way], eos=[], batch_size=rows)
        assert len(out.trace) == rows * rounds and out.stats.acceptance_rate == 1
        found.append(count[what])
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize("what", [WAITS, BLOCKING])
@pytest.mark.parametrize("way", LIMIT)
def test_waits_depend_neither_on_gamma_nor_on_the_number_of_rows(way, what, count):
    found = {(gamma, rows): all_kept(way, rows, gamma, count, what) for gamma in (1, 4) for rows in (1, 3)}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("gamma", [2, 5])
def test_several_drafts_wait_once_a_level(gamma, count):
    """To bring the tokens home, at each level that is tried, and for the outcome."""
    target = fast(there("fast", 0))
    pair = sd.Pair(target, fast(there("fast", 0, 0.3)))
    count.clear()
    out = sd.generate(pair, TEXTS[0], gamma, 24, temperature=1.0, drafts=2, eos=[])
    levels = sum(min(r.accepted + 1, len(r.drafted)) for r in out.trace)
    drafted = sum(bool(r.drafted) for r in out.trace)
    assert count[WAITS] == drafted + levels + len(out.trace)


@pytest.mark.parametrize("way", LIMIT)
def test_plain_decoding_waits_as_often_for_three_rows_as_for_one(way, count):
    """That waits are seen at all, and how many, whoever rewrites the loop: one a token at least."""
    per_token = []
    for rows in (1, 3):
        waits = []
        for new in (4, 9):
            count.clear()
            options = {"batch_size": rows, "eos": [], **WAYS[way]}
            sd.generate_plain(sd.Pair(fast(there("fast", 0))), TEXTS[:rows], new, **options)
            waits.append(count[WAITS])
        per_token.append((waits[1] - waits[0]) / 5)
    assert min(per_token) >= 1
