"""The draft that reads its target's hidden states: what it is fed, what it proposes, how it is trained."""

from dataclasses import replace
from random import Random

import pytest
import torch
from tiny import tiny_feature_draft
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_lib as sd
from specdec_lib.distill import features, needs, recipe
from specdec_lib.distill.evaluate import Answer, evaluate_draft, read
from specdec_lib.distill.features import drafted_logits, watched_layers
from specdec_lib.distill.recipe import Job, distill
from specdec_lib.drafters import ComposedDrafter, SamplingParams
from specdec_lib.drafters.on_disk import load_draft, write_draft
from specdec_lib.models import Pair, load_transformers, open_session
from specdec_lib.models.pair import fast

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3]]
LAYERS, WIDTH, VOCABULARY = 3, 32, 50


def a_target(**changes):
    torch.manual_seed(0)
    shape = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCABULARY, "intermediate_size": 48}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256} | changes
    return LlamaForCausalLM(LlamaConfig(**shape)).double().eval()


@pytest.fixture(scope="module")
def model():
    return a_target()


@pytest.fixture(scope="module")
def draft(model):
    return tiny_feature_draft(model)


@pytest.fixture
def pair(model, draft):
    return Pair(fast(model), sd.FeatureDrafter(draft), None)


def test_the_watched_states_are_those_of_transformers(model):
    """Also after rolling back and writing over, alone and in a batch where rows are dropped."""
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = torch.stack(model.model(ids, output_hidden_states=True).hidden_states[1:], 2)
    session = open_session(fast(model), capacity=4)  # too short: it grows
    session.capture_hidden([1, 2, 3])
    session.feed(ids[:1, :5])
    session.rollback(3)
    session.feed(ids[:1, 3:])
    torch.testing.assert_close(session.cache.features[:, :9], expected[:1], rtol=1e-4, atol=1e-5)

    batch = open_session(fast(model), 2, 4)
    batch.capture_hidden([1, 2, 3])
    batch.feed_rows([ids[0, :6].tolist(), ids[1, :2].tolist()], [0, 0])
    batch.rollback([4, 2])
    batch.feed_rows([ids[0, 4:].tolist(), ids[1, 2:8].tolist()], [1, 1])
    batch.select_rows([1])
    batch.feed_rows([ids[1, 8:].tolist()], [1])
    torch.testing.assert_close(batch.cache.features[:, :9], expected[1:], rtol=1e-4, atol=1e-5)


def test_only_an_empty_session_can_be_watched(model):
    session = open_session(fast(model))
    session.feed(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="capture them from the first token on"):
        session.capture_hidden([1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_drafts_from_the_laws_that_training_sees(pair, draft, temperature):
    """Round by round, whatever was refused before: the laws of a draft are those of the unrolled training pass."""
    rounds = []
    out = sd.generate(pair, PROMPTS[0], 4, 40, temperature, eos=[], on_round=rounds.append)
    text = PROMPTS[0] + out.tokens[0]
    at, lengths, tested = len(PROMPTS[0]), set(), 0
    for done in rounds:
        if n := len(done.drafted):
            ids = [*text[:at], *done.drafted]
            _, states = read(pair.target, ids, 1, watched_layers(LAYERS))
            states[at - 1 :] = 1e3  # the target has not read the text's last token: this must not matter
            for k, logits in enumerate(drafted_logits(draft, states, ids, n, steps=n)):
                if temperature:
                    assert float(logits[0].softmax(-1)[done.drafted[k]]) == pytest.approx(done.q[k], abs=1e-6)
                else:
                    assert int(logits[0].argmax()) == done.drafted[k]
                tested += 1
        lengths.add(done.accepted)
        at += len(done.emitted)
    assert tested > 20 and (len(lengths) > 2 or not temperature)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"gamma": 1}])
def test_greedy_text_is_the_targets(pair, options):
    plain = sd.generate_plain(pair, PROMPTS, 30, eos=[])
    assert sd.generate(pair, PROMPTS, max_new_tokens=30, eos=[], **options).tokens == plain.tokens


def test_a_batch_drafts_as_its_rows_alone(pair):
    """Also behind a lookup, where some rows draft with the model and others do not."""
    behind = sd.ComposedDrafter([sd.PromptLookupDrafter(min_ngram=1), pair.draft], [None, 2])
    prompts = [[1, 2, 3, 1, 2], [7, 8, 9], [3], [4, 4]]
    for drafter in (pair.draft, behind):
        both = [
            sd.generate(Pair(pair.target, drafter), prompts, 3, 25, 1.0, eos=[], batch_size=size) for size in (1, 4)
        ]
        assert both[0].tokens == both[1].tokens and both[0].stats.drafted == both[1].stats.drafted > 50


def test_what_was_drafted_is_forgotten(pair):
    """A second draft for the same text is the first one, and the target's session is as it was."""
    target = open_session(pair.target)
    drafting = pair.draft.start_batch(1, VOCABULARY, target)
    prompt = PROMPTS[0]
    target.feed_rows([prompt[:-1]], [0])
    drafts = [drafting.propose([prompt], [4], [SamplingParams(1.0)], [Random(5)])[0] for _ in range(2)]
    assert drafts[0].tokens == drafts[1].tokens and target.lengths == [len(prompt) - 1]
    torch.testing.assert_close(drafts[0].probs, drafts[1].probs)


def test_a_text_of_one_token_has_nothing_to_read(pair):
    assert sd.generate(pair, [3], gamma=2, max_new_tokens=6, eos=[]).trace[0].drafted == []


def test_it_survives_the_disk(pair, draft, tmp_path):
    manifest = write_draft(tmp_path / "mine", draft, {"target_hash": "x"})
    assert manifest["kind"] == "features"
    again = load_draft(tmp_path / "mine", "x", "cpu", "float64")
    before, after = (
        sd.generate(Pair(pair.target, drafter), PROMPTS[0], 3, 20, 1.0, eos=[]).tokens
        for drafter in (pair.draft, again)
    )
    assert before == after


@pytest.mark.parametrize(
    ("mine", "target", "said"),
    [
        ({}, {"hidden_size": 64}, "a target of width 32, 3 layers and 50 tokens, not one of 64, 3 and 50"),
        ({}, {"num_hidden_layers": 2}, "not one of 32, 2 and 50"),
        ({}, {"vocab_size": 51}, "not one of 32, 3 and 51"),
        ({"num_hidden_layers": 2}, {}, "has one layer, not 2"),
    ],
)
def test_a_draft_of_another_target_is_refused(mine, target, said, model):
    with pytest.raises(sd.SpecdecError, match=said):
        drafter = sd.FeatureDrafter(tiny_feature_draft(model, **mine))
        sd.generate(Pair(fast(a_target(**target)), drafter), PROMPTS[0])


def test_it_cannot_draft_alone(pair, model, draft):
    with pytest.raises(sd.SpecdecError, match="give it to generate with Pair"):
        pair.draft.start(VOCABULARY)
    with pytest.raises(sd.SpecdecError, match="cannot run alone"):
        draft(torch.tensor([[1]]))
    with pytest.raises(sd.SpecdecError, match="runs as FastLlama"):
        sd.generate(Pair(model, pair.draft), PROMPTS[0])


# -- made by distillation ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "who are you?", "kind": "a"}\n{"prompt": "hello there.", "kind": "b"}\n')
    return Job(
        folder / "draft", str(tiny_folder("llama", seed=2)), kind="features", tokens=2 * 16 * 64, layers=1, width=16,
        heads=2, shortlist=24, passes=12, batch=8, rate=0.05, max_new_tokens=12, rows=16, length=64, device="cpu",
        dtype="float32", work=folder / "work", prompts=prompts, every=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(job):
    return distill(job)


def test_a_draft_is_made_and_drafts(job, made):
    assert made["kind"] == "features" and made["recipe"]["steps"] == 3
    curve = made["training"]["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.1 and curve[0]["agreement"] < 0.1 < curve[-1]["agreement"]
    pair = sd.load_pair(job.target, job.out)
    assert type(pair.draft) is sd.FeatureDrafter
    text = "tell me"
    assert sd.generate(pair, text, 3, 20).tokens == sd.generate_plain(pair, text, 20).tokens
    behind = ComposedDrafter([sd.PromptLookupDrafter(), pair.draft])
    assert sd.generate(Pair(pair.target, behind, pair.tokenizer), text, 3, 20).tokens[0]


def test_states_and_training_are_not_done_again(job, made, monkeypatch):
    monkeypatch.setattr(features, "load_transformers", lambda *_: pytest.fail("the target read its text again"))
    monkeypatch.setattr(features, "at_answers", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(recipe, "evaluate", lambda *_, **__: {})
    assert distill(job)["files"] == made["files"]


def test_a_torn_file_of_states_is_written_again(job, made):
    shard = job.work / "text-00001.safetensors"
    whole = features.file_of(shard).read_bytes()
    features.file_of(shard).write_bytes(whole[: len(whole) // 2])
    assert not features.is_there(shard, [1, 2]) and not features.is_there(
        shard.with_name("text-00000.safetensors"), [1]
    )
    features.write_features(job.target, [shard], [1, 2], "cpu", "float32")
    assert features.file_of(shard).read_bytes() == whole


def test_agreement_by_position_is_that_of_free_drafts(job, made):
    """Every start of a text drafted anew, as a decoder would."""
    pair = sd.load_pair(job.target, job.out)
    prompt, text = (
        [5, 9, 17, 3],
        sd.generate_plain(sd.load_pair(job.target, "lookup"), [5, 9, 17, 3], 16, eos=[]).tokens[0],
    )
    answer = Answer("x", "a", prompt, text, text)
    model = load_transformers(job.out, "cpu")
    told = evaluate_draft(pair.target, model, [answer])["by_position"]
    tested, agreed = [0] * 8, [0] * 8
    target = open_session(pair.target)
    drafting = pair.draft.start_batch(1, 46, target)
    for start in range(len(text)):
        prefix = prompt + text[:start]
        target.feed_rows([prefix[target.lengths[0] : -1]], [0])
        gamma = min(8, len(text) - start)
        (draft,) = drafting.propose([prefix], [gamma], [SamplingParams()], [Random(0)])
        for k, (token, right) in enumerate(zip(draft.tokens, text[start:], strict=False)):
            tested[k] += 1
            agreed[k] += token == right
            if token != right:
                break
    expected = [round(a / t, 4) for a, t in zip(agreed, tested, strict=True) if t]
    assert told == expected and len(expected) > 1


def test_the_states_count_in_what_is_needed(job, made):
    """Two bytes for each number of the two watched layers, of width 32."""
    ready = recipe.prepare(job)
    config = ready.config
    with_states, without = (
        needs.needs(replace(job, kind=kind, tokens=10**6), config, torch.device("cpu"))
        for kind in ("features", "model")
    )
    assert with_states[0] - without[0] == with_states[1] - without[1] == pytest.approx(1.1e6 * 2 * 32 * 2)


def test_it_has_one_layer(job):
    with pytest.raises(sd.SpecdecError, match="has one layer, not 2: use layers 1"):
        replace(job, layers=2)
