"""Reports of numbers that were missing, undefined or wrong in what decoding returns."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import specdec_lib as sd
from specdec_lib.drafters import SamplingParams

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]
PROMPTS = [PROMPT, [4, 4, 4], [9]]


def test_logprobs_and_scores_are_those_of_transformers(tiny):
    """https://github.com/ggml-org/llama.cpp/issues/27972 - log-probability 0 for every token once a draft is used."""
    case = tiny()
    told = case.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0,
        repetition_penalty=1.5, return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    penalty = [RepetitionPenaltyLogitsProcessor(1.5)]
    out = sd.generate(case.pair, PROMPT, max_new_tokens=20, eos=[], processors=penalty, logprobs=True)
    new = told.sequences[0, len(PROMPT) :]
    assert out.tokens == [new.tolist()] and out.stats.kept > 0
    for mine, theirs in ((out.logprobs, told.logits), (out.scores, told.scores)):
        expected = torch.cat(theirs).log_softmax(-1).gather(1, new[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(mine[0]), expected.to(torch.float32), rtol=1e-4, atol=1e-4)


def test_scores_of_sampled_tokens_are_in_the_law_that_was_sampled(tiny):
    """https://github.com/vllm-project/vllm/issues/34497 - log-probabilities of another law than the tokens'."""
    case, sampling = tiny(), SamplingParams(0.8, top_k=5)
    out = sd.generate(
        case.pair, PROMPT, max_new_tokens=20, eos=[], logprobs=True, temperature=0.8, top_k=5, verifier="block"
    )
    with torch.no_grad():
        logits = case.model(torch.tensor([PROMPT + out.tokens[0]])).logits[0, len(PROMPT) - 1 : -1]
    for mine, laws in ((out.scores[0], sampling.probs(logits).log()), (out.logprobs[0], logits.log_softmax(-1))):
        expected = laws[range(20), out.tokens[0]]
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)


def test_logprobs_have_to_be_asked_for(tiny):
    """https://github.com/vllm-project/vllm/issues/17876 - asked for, and silently empty."""
    out = sd.generate(tiny().pair, PROMPT, max_new_tokens=4)
    with pytest.raises(sd.SpecdecError, match="decode with logprobs=True"):
        _ = out.logprobs


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_add_up_to_the_whole(batch_size, tiny):
    """https://github.com/sgl-project/sglang/pull/33518 - counts that contradict each other."""
    out = sd.generate(tiny().pair, PROMPTS, gamma=3, max_new_tokens=20, batch_size=batch_size, temperature=1.0)
    assert len(out.rows) == 3
    for name in ("rounds", "emitted", "drafted", "accepted", "kept", "rejected", "trimmed", "prefill_passes"):
        assert sum(getattr(row, name) for row in out.rows) == getattr(out.stats, name)
    assert [row.emitted for row in out.rows] == [len(tokens) for tokens in out.tokens]
    assert [sum(h) for h in zip(*(row.histogram + [0] * 9 for row in out.rows), strict=False)][:4] == (
        out.stats.histogram + [0] * 4
    )[:4]
    assert sum(row.seconds for row in out.rows) <= out.stats.seconds
    rows = [r.row for r in out.trace]
    assert rows == sorted(rows) and [r.row for r in out.trace if r.row == 1]


def test_acceptance_counts_only_what_was_tested(tiny):
    """https://github.com/ggml-org/llama.cpp/issues/3919 - an acceptance rate of 100 %, made by what was not counted."""
    out = sd.generate(tiny(noise=1.0).pair, PROMPT, gamma=6, max_new_tokens=40, eos=[])
    tested = sum(min(r.accepted + 1, len(r.drafted)) for r in out.trace)
    assert out.stats.acceptance_rate == out.stats.kept / tested
    assert out.stats.accepted_per_drafted < out.stats.acceptance_rate < 1


def test_the_trace_as_a_frame(tiny):
    """https://github.com/ggml-org/llama.cpp/pull/24536 - acceptance that no output shows."""
    out = sd.generate(tiny().pair, PROMPTS, max_new_tokens=12, logprobs=True)
    frame = out.frame()
    assert len(frame) == out.stats.rounds and frame.kept.sum() == out.stats.kept
    assert frame.groupby("row").emitted.apply(lambda e: [t for tokens in e for t in tokens]).tolist() == out.tokens
    assert frame.groupby("row")["round"].max().tolist() == [row.rounds - 1 for row in out.rows]
    assert sd.generate(tiny().pair, PROMPTS, max_new_tokens=0).frame().empty


def test_the_same_seed_the_same_counts(tiny):
    """https://github.com/vllm-project/vllm/issues/53436 - acceptance that changes from run to run."""
    runs = [sd.generate(tiny().pair, PROMPTS, temperature=1.0, seed=7, max_new_tokens=16) for _ in range(2)]
    assert [(r.drafted, r.accepted) for r in runs[0].trace] == [(r.drafted, r.accepted) for r in runs[1].trace]


def test_as_many_drafted_as_asked_for(tiny):
    """https://github.com/huggingface/transformers/issues/40739 - the draft length that was given was not used."""
    for gamma in (1, 4, 7):
        out = sd.generate(tiny().pair, PROMPT, gamma=gamma, max_new_tokens=40, eos=[])
        left = 40
        for r in out.trace:
            assert len(r.drafted) == min(gamma, left - 1)
            left -= len(r.emitted)
