"""The two loops: greedy identity, exact lengths, ends of text, accounting, seeds, nothing changed behind one's back."""

from dataclasses import replace
from itertools import product
from math import ceil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specdec_lib as sd
from specdec_lib.audit.identity import compare
from specdec_lib.bench.prompts import load_prompts
from specdec_lib.decode import summarise
from specdec_lib.drafters.on_disk import has_own_tokenizer, load_draft, packaged_drafts, target_hash
from specdec_lib.models import load_model, load_tokenizer, load_transformers
from specdec_lib.studies.both_sides import disturbed
from specdec_lib.verify import VERIFIERS, Verifier, get_verifier

KINDS = ["llama", "qwen2", "gpt2", "gemma"]
PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    """`tiny(kind, noise) -> Pair`: a tiny target and a noisy copy of it as the draft."""

    def make(kind="llama", noise=0.3):
        target = load_model(tiny_folder(kind), device="cpu")
        draft = disturbed(load_transformers(tiny_folder(kind), device="cpu"), noise)
        return sd.Pair(target, draft, load_tokenizer(tiny_folder(kind)))

    return make


@pytest.fixture(scope="module")
def packaged(packaged_folder):
    return sd.load_pair(packaged_folder, device="cpu")


def reference_greedy(model, prompt, n):
    out = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


# -- greedy identity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_and_transformers_on_tiny_models(kind, tiny, tiny_folder):
    pair = tiny(kind)
    reference = load_transformers(tiny_folder(kind), device="cpu")
    accepted = rejected = 0
    for start, gamma in product(range(5), (1, 2, 3, 5, 8)):
        prompt = [start + 3, 9, 17, 3 + start]
        plain = sd.generate_plain(pair, prompt, max_new_tokens=40).tokens[0]
        assert plain == reference_greedy(reference, prompt, 40)
        out = sd.generate(pair, prompt, gamma=gamma, max_new_tokens=40)
        difference = compare(pair.target, prompt, plain, out.tokens[0])
        assert difference is None or difference.tie
        accepted, rejected = accepted + out.stats.kept, rejected + out.stats.rejected
    assert accepted > 0 and rejected > 0  # both branches of the rule were taken


def packaged_identity(pair, prompts, gammas, drafts, n):
    """Runs all; returns (runs, ties)."""
    reference = load_transformers("packaged", device="cpu")
    runs = ties = accepted = rejected = 0
    for prompt in prompts:
        ids = pair.encode(prompt.messages)
        plain = sd.generate_plain(pair, ids, max_new_tokens=n).tokens[0]
        texts = [reference_greedy(reference, ids, n)]
        for gamma, draft in product(gammas, drafts):
            out = sd.generate(sd.Pair(pair.target, draft, pair.tokenizer), ids, gamma=gamma, max_new_tokens=n)
            texts.append(out.tokens[0])
            accepted, rejected = accepted + out.stats.kept, rejected + out.stats.rejected
        for text in texts:
            difference = compare(pair.target, ids, plain, text)
            assert difference is None or difference.tie, (prompt.id, difference)
            runs, ties = runs + 1, ties + (difference is not None)
    assert accepted > 0 and rejected > 0
    return runs, ties


def every_draft(pair):
    """Lookup, all packaged drafts of the target's tokens, a composition, and the target itself."""
    folders = [folder for folder in packaged_drafts().values() if not has_own_tokenizer(folder)]
    loaded = [load_draft(folder, target_hash("packaged"), device="cpu") for folder in folders]
    lookup = sd.PromptLookupDrafter()
    neural = next(draft for draft in loaded if hasattr(draft, "config"))
    return [lookup, *loaded, sd.ComposedDrafter([lookup, sd.ModelDrafter(neural)]), pair.target]


def test_greedy_identity_on_the_packaged_target(packaged):
    """A part of the next one, which takes ten minutes: three kinds of prompt, few tokens."""
    runs, ties = packaged_identity(packaged, load_prompts(limit=1)[::2], (1, 5), every_draft(packaged), n=8)
    print(f"{runs} greedy texts of the packaged target, {ties} part at a tie")


@pytest.mark.large
def test_greedy_identity_on_the_packaged_target_all_gammas(packaged):
    runs, ties = packaged_identity(packaged, load_prompts(limit=4), range(1, 9), every_draft(packaged), n=24)
    print(f"{runs} greedy texts of the packaged target, {ties} part at a tie")
    assert ties <= runs // 100


def test_a_real_difference_is_not_called_a_tie(tiny):
    pair = tiny()
    plain = sd.generate_plain(pair, PROMPT, max_new_tokens=8).tokens[0]
    other = [*plain[:3], (plain[3] + 1) % 46, *plain[4:]]
    difference = compare(pair.target, PROMPT, plain, other)
    assert (difference.position, difference.tie) == (3, False)
    assert not compare(pair.target, PROMPT, plain, plain[:5]).tie


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_other_verifiers_at_temperature_zero_write_the_greedy_text(verifier, tiny):
    pair = tiny()
    rule = replace(get_verifier(verifier), name="as laws")  # so that no short cut is taken
    plain = sd.generate_plain(pair, PROMPT, max_new_tokens=30, eos=[]).tokens
    for one in (verifier, rule):
        out = sd.generate(pair, PROMPT, gamma=3, max_new_tokens=30, verifier=one, eos=[])
        assert out.tokens == plain
        assert out.stats.kept > 0 and out.stats.rejected > 0


def test_a_wrong_rule_writes_another_text(tiny):
    pair = tiny()
    plain = sd.generate_plain(pair, PROMPT, max_new_tokens=30, eos=[]).tokens
    wrong = Verifier("accepts all", lambda p, q, x: [0] * len(x) + [1], VERIFIERS["token"].correction, False, "")
    assert sd.generate(pair, PROMPT, gamma=3, max_new_tokens=30, verifier=wrong, eos=[]).tokens != plain


# -- the target as its own draft -----------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "n"), product((1, 3, 4, 7), (1, 2, 8, 21)))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_draft(gamma, n, temperature, tiny):
    target = tiny().target
    out = sd.generate(sd.Pair(target, target), PROMPT, gamma=gamma, max_new_tokens=n, temperature=temperature, eos=[])
    assert out.stats.target_passes == ceil(n / (gamma + 1))
    assert out.stats.rejected == 0
    assert out.stats.drafted == 0 or out.stats.acceptance_rate == 1


# -- lengths and ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_length(n, temperature, tiny):
    pair = tiny()
    for run in (
        sd.generate(pair, PROMPT, gamma=4, max_new_tokens=n, temperature=temperature, eos=[]),
        sd.generate_plain(pair, PROMPT, max_new_tokens=n, temperature=temperature, eos=[]),
    ):
        assert len(run.tokens[0]) == n == run.stats.emitted


def test_prompt_of_one_token(tiny):
    pair = tiny()
    assert sd.generate(pair, [7], max_new_tokens=6).tokens == sd.generate_plain(pair, [7], max_new_tokens=6).tokens


@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
def test_an_end_inside_an_accepted_block_ends_the_text(gamma, tiny):
    target = tiny().target
    pair = sd.Pair(target, target)
    text = sd.generate_plain(pair, PROMPT, max_new_tokens=24, eos=[]).tokens[0]
    trimmed = 0
    for position in range(len(text)):
        end = text[position]
        out = sd.generate(pair, PROMPT, gamma=gamma, max_new_tokens=24, eos=[end])
        assert out.tokens[0] == text[: text.index(end) + 1]
        trimmed += out.stats.trimmed
    assert trimmed > 0  # some ends lay inside a block


# -- accounting ----------------------------------------------------------------------------------------


def assert_identities(out):
    stats = out.stats
    assert sum(stats.histogram) == stats.rounds == stats.target_passes
    assert sum(n * count for n, count in enumerate(stats.histogram)) == stats.accepted
    assert stats.emitted == stats.accepted + stats.rounds - stats.trimmed == sum(map(len, out.tokens))
    assert stats.drafted == sum(len(r.drafted) for r in out.trace)
    for row, tokens in enumerate(out.tokens):
        assert [t for r in out.trace if r.row == row for t in r.emitted] == tokens
    for r in out.trace:
        assert r.emitted[: r.kept] == r.drafted[: r.kept]
        assert 0 <= r.accepted <= len(r.drafted) == len(r.q) == len(r.p)
        assert r.kept + r.rejected <= len(r.drafted)


@given(
    gamma=st.integers(1, 7),
    n=st.integers(0, 25),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    noise=st.sampled_from([0.0, 0.2, 1.0]),
    ends=st.lists(st.integers(0, 45), max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_accounting_identities(tiny, gamma, n, temperature, noise, ends, seed):
    prompts = [PROMPT, PROMPT[:1], [4, 4, 4]]
    out = sd.generate(tiny(noise=noise), prompts, gamma, n, temperature, eos=ends, seed=seed)
    assert_identities(out)


def test_acceptance_rate_counts_what_was_tested():
    from specdec_lib.decode import Round

    common = {"q": [1.0] * 4, "p": [1.0] * 4, "draft_passes": 4}
    common |= {"draft_seconds": 0.0, "target_seconds": 0.0, "seconds": 0.0}
    trace = [
        Round(0, [1, 2, 3, 4], 1, [1, 9], **common),  # one kept, one refused, two never tested
        Round(0, [1, 2, 3, 4], 4, [1, 2], **common),  # all kept by the verifier, the text ended after two
    ]
    stats = summarise(trace)
    assert stats.acceptance_rate == 3 / 4
    assert stats.accepted_per_drafted == 5 / 8
    assert stats.block_efficiency == 2
    assert stats.trimmed == 3


def test_cache_holds_all_but_the_last_token_after_each_round(tiny, monkeypatch):
    pair = tiny()
    sessions = []
    monkeypatch.setattr("specdec_lib.decode.loop.open_session", spy(sessions))
    lengths = []

    def check(done):
        lengths.append((sessions[-1].length, sum(map(len, emitted)) + len(done.emitted)))
        emitted.append(done.emitted)

    for temperature in (0.0, 1.0):
        emitted = []
        sd.generate(pair, PROMPT, gamma=4, max_new_tokens=30, temperature=temperature, eos=[], on_round=check)
    assert len(lengths) > 4
    assert all(held == len(PROMPT) + new - 1 for held, new in lengths)


def spy(sessions):
    from specdec_lib.models import open_session

    def opened(*args, **kwargs):
        sessions.append(open_session(*args, **kwargs))
        return sessions[-1]

    return opened


# -- randomness ----------------------------------------------------------------------------------------


def test_same_seed_same_text_and_the_callers_random_state_is_untouched(tiny):
    pair = tiny()
    state = torch.get_rng_state()
    runs = [sd.generate(pair, PROMPT, max_new_tokens=30, temperature=1.0, seed=s).tokens for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(state, torch.get_rng_state())


def test_a_row_does_not_depend_on_its_neighbours(tiny):
    pair = tiny()
    alone = sd.generate(pair, [PROMPT], max_new_tokens=20, temperature=1.0).tokens[0]
    assert sd.generate(pair, [PROMPT, [4, 5]], max_new_tokens=20, temperature=1.0).tokens[0] == alone


def test_the_models_are_not_changed(tiny_folder):
    target, draft = (load_transformers(tiny_folder("llama", seed=s), device="cpu") for s in (0, 1))
    before = [
        (m.config.to_dict(), m.generation_config.to_dict(), [p.clone() for p in m.parameters()])
        for m in (target, draft)
    ]
    sd.generate(sd.Pair(target, draft), PROMPT, max_new_tokens=12, temperature=1.0, top_k=5)
    with pytest.raises(RuntimeError, match="stop here"):
        sd.generate(sd.Pair(target, draft), PROMPT, max_new_tokens=12, on_round=stop)
    for model, (config, generation_config, weights) in zip((target, draft), before, strict=True):
        assert model.config.to_dict() == config and model.generation_config.to_dict() == generation_config
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def stop(done):
    raise RuntimeError("stop here")


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma must be a whole number >= 1"),
        ({"gamma": 2.5}, "gamma must be a whole number >= 1"),
        ({"gamma": True}, "gamma must be a whole number >= 1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be a whole number >= 0"),
        ({"temperature": -0.1}, "temperature must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature must be a number >= 0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p must lie in \(0, 1\]"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be a whole number >= 1"),
        ({"temperature": 1.0, "min_p": -1}, r"min_p must lie in \[0, 1\]"),
        ({"temperature": 0.0, "top_k": 5}, "top_k changes nothing at temperature 0"),
        ({"verifier": "tokne"}, "unknown verifier 'tokne': use one of token"),
        ({"verifier": "greedy", "temperature": 1.0}, "set temperature=0"),
        ({"max_new_tokens": 600}, "exceed the target's context of 512"),
    ],
)
def test_bad_options(options, message, tiny):
    with pytest.raises(sd.SpecdecError, match=message):
        sd.generate(tiny(), PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty prompt"),
        ("   ", "empty prompt"),
        ([], "no prompt"),
        ([[]], "empty or unreadable prompt"),
        (None, "no prompt"),
        ([1, 2, 999], "token id 999 in the prompt is outside the target's vocabulary of 46"),
        ([{"role": "user", "content": ""}], "empty prompt"),
    ],
)
def test_bad_prompts(prompt, message, tiny):
    with pytest.raises(sd.SpecdecError, match=message):
        sd.generate(tiny(), prompt)


def test_a_pair_that_cannot_work(tiny_folder, tmp_path):
    target = load_model(tiny_folder("llama"), device="cpu")
    small = load_model(tiny_folder("llama", vocab_size=50), device="cpu")
    with pytest.raises(sd.SpecdecError, match=r"draft's vocabulary \(50 tokens\) does not fit the target's \(46\)"):
        sd.Pair(target, small)
    with pytest.raises(sd.SpecdecError, match="has no draft"):
        sd.generate(sd.Pair(target), PROMPT)
    with pytest.raises(sd.SpecdecError, match="is not a draft"):
        sd.generate(sd.Pair(target, draft=object()), PROMPT)
    with pytest.raises(sd.SpecdecError, match=r"has no config\.json"):
        sd.load_pair(tmp_path)
    with pytest.raises(sd.SpecdecError, match="there is no model folder"):
        sd.load_pair(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(sd.SpecdecError, match="cannot load a language model"):
        sd.load_pair(tmp_path)
    with pytest.raises(sd.SpecdecError, match="unknown device"):
        sd.load_pair(tiny_folder("llama"), device="abacus")
    with pytest.raises(sd.SpecdecError, match="unknown dtype"):
        sd.load_pair(tiny_folder("llama"), dtype="float8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_like_a_hub_snapshot_takes_text_and_chat(kind, tiny_folder):
    pair = sd.load_pair(tiny_folder(kind), tiny_folder(kind), device="cpu")
    prompts = ["hello there", "abc"]
    if kind != "gpt2":  # the one without a chat template
        prompts.append([{"role": "user", "content": "what is it?"}])
    out = sd.generate(pair, prompts, max_new_tokens=8, eos=[])
    assert [len(t) for t in out.tokens] == [8] * len(prompts)
    assert all(isinstance(text, str) and text for text in out.texts)
