"""Reports of encoder-decoders that were left out of batches, processors and criteria, or read them wrongly."""

from itertools import islice

import pytest
import torch
import transformers
from kit import law_of, slow_greedy, slow_law, total_variation
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    MaxLengthCriteria,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import specdec_lib as sd
from specdec_lib.audit.identity import compare
from specdec_lib.models import load_transformers, open_session
from specdec_lib.models.seq2seq import EncoderDecoderSession
from specdec_lib.models.support import check_rows
from specdec_lib.studies.both_sides import disturbed
from specdec_lib.studies.tiny_t5 import DRAFT, TARGET
from specdec_lib.studies.translation import sentences

SOURCES = [[5, 9, 17, 3, 8, 9, 17, 3], [4], [30, 2, 2], [7, 7, 12, 40, 1, 6, 6, 6, 21, 33, 8], [9, 17]]
N = 24

# name: (what transformers' generate is told, what ours is)
OPTIONS = {
    "nothing": ({}, {}),
    "repetition": ({"repetition_penalty": 1.8}, {"processors": RepetitionPenaltyLogitsProcessor(1.8)}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"processors": [NoRepeatNGramLogitsProcessor(2)]}),
    "bad words": ({"bad_words_ids": [[7], [9, 17]]}, {"processors": [NoBadWordsLogitsProcessor([[7], [9, 17]], 0)]}),
    "a forced end": ({"forced_eos_token_id": 0}, {"processors": [ForcedEOSTokenLogitsProcessor(N + 1, 0, "cpu")]}),
    "no early end": ({"min_new_tokens": 12}, {"min_new_tokens": 12}),
    "a criterion": (
        {"stopping_criteria": transformers.StoppingCriteriaList([MaxLengthCriteria(8)])},
        {"criteria": MaxLengthCriteria(8)},
    ),
}


def theirs(model, source, **options):
    out = model.generate(torch.tensor([source]), max_new_tokens=N, do_sample=False, **options)
    return out[0, 1:].tolist()  # less the start token


@pytest.mark.parametrize("name", OPTIONS)
def test_the_greedy_text_is_that_of_transformers(name, tiny):
    """https://github.com/vllm-project/vllm/issues/18902 - options that hold for one kind of model only."""
    case, (told, options) = tiny("t5", noise=0.1), OPTIONS[name]
    expected = [theirs(case.model, source, **told) for source in SOURCES]
    for size in (1, 3):
        out = sd.generate(case.pair, SOURCES, 4, max_new_tokens=N, batch_size=size, **options)
        assert out.tokens == expected
        assert out.stats.kept > 0 and out.stats.rejected > 0
        lookup = case.with_draft(sd.PromptLookupDrafter(max_ngram=1))
        out = sd.generate(lookup, SOURCES, 4, max_new_tokens=N, batch_size=size, **options)
        assert out.tokens == expected
        assert out.stats.drafted > 0
        assert sd.generate_plain(case.pair, SOURCES, max_new_tokens=N, batch_size=size, **options).tokens == expected
    if name not in ("nothing", "bad words"):
        assert expected != [theirs(case.model, source) for source in SOURCES]


def test_criteria_and_processors_are_shown_the_output_alone(tiny):
    """https://github.com/huggingface/transformers/issues/48039 - criteria asked at block ends only."""
    case, shown, processed = tiny("t5"), [], []

    def criterion(ids, scores):
        shown.append(ids.tolist())
        return False

    def processor(ids, scores):
        processed.append(ids.tolist())
        return scores

    pair = case.with_draft(case.pair.target)
    out = sd.generate(pair, SOURCES[0], 4, max_new_tokens=9, eos=[], criteria=criterion, processors=processor)
    text = [case.model.config.decoder_start_token_id, *out.tokens[0]]
    assert out.stats.rounds == 2
    assert shown == [[text[:n]] for n in range(2, 11)]
    # the draft's first, then the target's, in each of the two rounds
    assert processed == [[text[:n]] for n in (*range(1, 5), *range(1, 6), *range(6, 9), *range(6, 10))]


@pytest.fixture(scope="module")
def three_tokens(tiny_folder):
    """A T5 pair of three tokens, so that all texts can be enumerated."""
    flat = {"vocab_size": 3, "eos_token_id": 2, "initializer_factor": 1.0}
    folders = [tiny_folder("t5", seed=s, **flat) for s in (5, 2)]
    return sd.Pair(*(load_transformers(folder, "cpu", "float64") for folder in folders))


def test_the_law_of_the_output_under_processors(three_tokens):
    """https://github.com/huggingface/transformers/issues/47932 - drafts drawn from another law than was tested."""
    rules = [RepetitionPenaltyLogitsProcessor(1.7)]
    options = {"temperature": 1.0, "eos": [2], "max_new_tokens": 3, "processors": rules, "min_new_tokens": 1}
    found = law_of(lambda: tuple(sd.generate(three_tokens, [1, 2], gamma=2, **options).tokens[0]))
    expected = slow_law(three_tokens.target, [1, 2], 3, ends=[2], min_new=1, processors=rules)
    assert total_variation(found, expected) < 1e-12
    assert total_variation(expected, slow_law(three_tokens.target, [1, 2], 3, ends=[2], min_new=1)) > 0.01
    assert (
        total_variation(expected, slow_law(three_tokens.draft, [1, 2], 3, ends=[2], min_new=1, processors=rules)) > 0.01
    )


def test_the_law_of_two_rows_together(three_tokens):
    """https://github.com/lucidrains/speculative-decoding/issues/3 - rows that differ corrupted each other."""
    sources = [[1, 2, 0, 1], [2]]
    options = {"temperature": 1.0, "eos": [], "max_new_tokens": 2, "gamma": 1, "batch_size": 2}
    found = law_of(lambda: tuple(map(tuple, sd.generate(three_tokens, sources, **options).tokens)))
    one, other = (slow_law(three_tokens.target, source, 2) for source in sources)
    expected = {(a, b): p * q for a, p in one.items() for b, q in other.items()}
    assert total_variation(found, expected) < 1e-12
    assert total_variation(one, other) > 0.01


def test_the_law_of_several_drafts(three_tokens):
    """https://github.com/foundation-model-stack/fms-extras/issues/12 - several candidates compared to one sample."""
    options = {"temperature": 1.0, "eos": [], "max_new_tokens": 2, "gamma": 2, "drafts": 2}
    rules = [RepetitionPenaltyLogitsProcessor(1.7)]
    found = law_of(lambda: tuple(sd.generate(three_tokens, [1, 2], processors=rules, **options).tokens[0]))
    assert total_variation(found, slow_law(three_tokens.target, [1, 2], 2, processors=rules)) < 1e-12


@pytest.mark.parametrize("name", ["MT5", "UMT5"])
def test_other_models_of_relative_positions(name):
    """https://github.com/feifeibear/LLMSpeculativeSampling/issues/24 - batches refused."""
    shape = {"vocab_size": 46, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = getattr(transformers, f"{name}Config")(**shape, decoder_start_token_id=0, initializer_factor=2.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, draft = (getattr(transformers, f"{name}ForConditionalGeneration")(config) for _ in range(2))
    draft.load_state_dict(model.state_dict())
    model, draft = model.double().eval(), disturbed(draft.double().eval(), 0.1)
    out = sd.generate(sd.Pair(model, draft), SOURCES, gamma=4, max_new_tokens=16, eos=[], batch_size=5)
    assert out.tokens == [slow_greedy(model, source, 16) for source in SOURCES]
    assert out.stats.kept > 0 and out.stats.rejected > 0


def test_absolute_positions_are_refused_by_name(tiny):
    """https://github.com/huggingface/transformers/issues/32165 - a batch that is taken and written wrongly."""
    shape = {"vocab_size": 46, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    small = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**shape, **small)).eval()
    rounds = []
    for pair in (sd.Pair(model, model), sd.Pair(tiny("t5").pair.target, model)):
        with pytest.raises(
            sd.SpecdecError, match="BartForConditionalGeneration cannot decode rows of different length"
        ):
            sd.generate(pair, SOURCES, batch_size=2, max_new_tokens=4, on_round=rounds.append)
    assert not rounds
    assert sd.generate(sd.Pair(model, model), SOURCES[0], max_new_tokens=4, eos=[]).stats.rejected == 0


def test_each_encoder_runs_once_for_each_batch(tiny_folder):
    """https://github.com/huggingface/transformers/pull/48000 - a source that was read again in every round."""
    pair = sd.Pair(*(load_transformers(tiny_folder("t5", seed=seed), "cpu", "float64") for seed in (0, 1)))
    read = []
    for model in (pair.target, pair.draft):
        check_rows(model)  # asks the model a few passes
        model.get_encoder().register_forward_hook(
            lambda module, args, kwargs, output: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
    out = sd.generate(pair, SOURCES[:4], gamma=3, max_new_tokens=12, eos=[], batch_size=2)
    assert out.stats.rounds > 8
    assert read == [(2, 8), (2, 8), (2, 11), (2, 11)]


def test_feeding_and_rolling_back_rows_at_will(tiny_folder):
    """https://github.com/huggingface/transformers/pull/49019 - masks and positions that did not follow a rollback."""
    model = load_transformers(tiny_folder("t5"), "cpu", "float64")
    run = open_session(model, 3)
    assert isinstance(run, EncoderDecoderSession)
    marker, texts = run.marker, [[], [], []]
    steps = [  # what is fed, logits asked for, lengths kept
        ([[5, 9, 17], [], [3]], [0, 0, 0], [3, 0, 1]),
        ([[8, marker, 6], [], [7, marker]], [2, 0, 1], [6, 0, 3]),
        ([[1, 2, 3], [4, 4, marker, 9], []], [3, 2, 0], [7, 4, 3]),  # a source that comes late
        *[([[6, 7, 8, 9, 10], [11, 12, 13], [14]], [5, 3, 1], [7, 4, 3]) for _ in range(4)],
        ([[], [15, 16, 17, 18], [19, 20]], [0, 4, 2], [2, 8, 5]),  # into the first source
        ([[12, 13, marker, 14], [1], []], [2, 1, 0], [6, 5, 0]),
        ([[7], [8], [9, 9, marker]], [1, 1, 1], [7, 6, 3]),
    ]
    for rows, last, lengths in steps:
        texts = [text + row for text, row in zip(texts, rows, strict=True)]
        logits = run.feed_rows(rows, last)
        assert run.lengths == [len(text) for text in texts]
        for text, k, found in zip(texts, last, logits, strict=True):
            if k:
                alone = open_session(model).feed(torch.tensor([text]), last=k)[0]
                torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        run.rollback(lengths)
        texts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    assert run.cache.get_seq_length() <= 5  # what was rolled back does not pile up
    run.select_rows([2, 0])
    for text, found in zip((texts[2] + [5], texts[0] + [6, 7]), run.feed_rows([[5], [6, 7]], [1, 2]), strict=True):
        alone = open_session(model).feed(torch.tensor([text]), last=len(found))[0]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="only 0 of those fed follow the source"):
        open_session(model, 2).feed_rows([[5, 6], [7, marker]], [1, 1])


def test_rows_of_the_packaged_pair():
    """https://github.com/huggingface/transformers/issues/30611 - float32, where texts may part at a tie only."""
    pair = sd.load_pair(TARGET, DRAFT, device="cpu")
    sources = [pair.encode(s.english) for s in islice(sentences(9, held_out=True), 6)]
    assert len({len(ids) for ids in sources}) > 2
    for name in ("nothing", "repetition", "n-grams"):
        told, options = OPTIONS[name]
        for size in (1, 4):
            out = sd.generate(pair, sources, gamma=5, max_new_tokens=N, batch_size=size, **options)
            assert out.stats.kept > 0 and out.stats.rejected > 0
            for ids, tokens in zip(sources, out.tokens, strict=True):
                difference = compare(pair.target, ids, theirs(pair.target, ids[:-1], **told), tokens)
                assert difference is None or difference.tie
