"""Reports of batches that were refused, or whose rows came out wrong: row by row the text of batch size 1."""

import pytest
import torch
from kit import slow_greedy

import specdec_lib as sd
from specdec_lib.bench.batches import throughput
from specdec_lib.decode.draft_length import Heuristic
from specdec_lib.models import load_model, load_transformers
from specdec_lib.models.session import FastSession, TransformersSession, open_session

PROMPTS = [[5, 9, 17, 3, 8, 9, 17, 3], [4], [30, 2, 2], [7, 7, 12, 40, 1, 6, 6, 6, 21, 33, 8], [9, 17]]
KINDS = ["llama", "qwen2", "gpt2", "gemma", "mistral", "gemma2", "gemma3", "t5"]


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_write_what_they_write_alone(kind, tiny):
    """https://github.com/lucidrains/speculative-decoding/issues/3 - rows that differ corrupted each other."""
    case = tiny(kind)
    expected = [slow_greedy(case.model, prompt, 24) for prompt in PROMPTS]
    assert len({len(p) for p in PROMPTS}) == len(PROMPTS)
    for options in ({"gamma": 4}, {"gamma": 1}, {"gamma": Heuristic()}, {"gamma": 4, "verifier": "block"}):
        out = sd.generate(case.pair, PROMPTS, max_new_tokens=24, eos=[], batch_size=5, **options)
        assert out.tokens == expected
        assert out.stats.kept > 0 and out.stats.rejected > 0
    assert sd.generate_plain(case.pair, PROMPTS, max_new_tokens=24, eos=[], batch_size=2).tokens == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_other_drafters_in_a_batch(kind, draft, tiny):
    """https://github.com/feifeibear/LLMSpeculativeSampling/issues/24 - batches refused."""
    case = tiny(kind)
    pair = case.with_draft(case.pair.target if draft == "itself" else sd.PromptLookupDrafter())
    out = sd.generate(pair, PROMPTS, gamma=5, max_new_tokens=24, eos=[], batch_size=5)
    assert out.tokens == [slow_greedy(case.model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_rows_end_on_their_own(kind, tiny):
    """https://github.com/huggingface/transformers/issues/32165 - one row's end must not end or pad another."""
    case = tiny(kind)
    ends = [slow_greedy(case.model, PROMPTS[0], 5)[4], slow_greedy(case.model, PROMPTS[3], 12)[11]]
    expected = [slow_greedy(case.model, prompt, 24, ends=ends) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 2
    for size in (2, 3, 5):
        out = sd.generate(case.pair, PROMPTS, gamma=4, max_new_tokens=24, eos=ends, batch_size=size)
        assert out.tokens == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_sampled_rows_are_those_of_batch_size_one(kind, tiny):
    """https://github.com/vllm-project/vllm/issues/9441 - seeded requests that changed each other's draws."""
    options = {"gamma": 3, "max_new_tokens": 16, "temperature": 1.0, "seed": 5, "eos": []}
    alone = sd.generate(tiny(kind).pair, PROMPTS, **options)
    together = sd.generate(tiny(kind).pair, PROMPTS, batch_size=4, **options)
    assert together.tokens == alone.tokens
    assert [(r.drafted, r.accepted) for r in together.trace] == [(r.drafted, r.accepted) for r in alone.trace]


def test_a_row_whose_draft_has_no_context_left(tiny, tiny_folder):
    """https://github.com/vllm-project/vllm/pull/24662 - one long row in a batch that the draft can still follow."""
    case = tiny("gpt2")
    short = load_model(tiny_folder("gpt2", n_positions=20), "cpu", "float64")
    out = sd.generate(case.with_draft(short), PROMPTS, gamma=4, max_new_tokens=24, eos=[], batch_size=5)
    assert out.tokens == [slow_greedy(case.model, prompt, 24) for prompt in PROMPTS]
    assert all(row.drafted > 0 for row in out.rows)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "gemma2"])
def test_feeding_and_rolling_back_rows_at_will(kind, tiny_folder):
    """https://github.com/huggingface/transformers/pull/49019 - masks and positions that did not follow a rollback."""
    model = load_transformers(tiny_folder(kind), "cpu", "float64")
    run = open_session(load_model(tiny_folder(kind), "cpu", "float64"), 3)
    assert isinstance(run, FastSession if kind == "llama" else TransformersSession)
    texts = [[], [], []]
    steps = [
        ([[5, 9, 17], [], [3]], [1, 0, 0], [3, 0, 1]),
        ([[8], [4, 4], [7, 30, 2, 2]], [1, 2, 3], [2, 2, 5]),
        ([[1, 2, 3, 4, 5, 6], [9], []], [6, 1, 0], [4, 3, 2]),
        *[([[6, 7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17]], [5, 4, 3], [4, 3, 2]) for _ in range(8)],
        ([[12], [12], [12]], [1, 1, 1], [0, 0, 0]),
        ([[12], [13], []], [1, 1, 0], [1, 1, 0]),
    ]
    for rows, last, lengths in steps:
        room = max(map(len, texts)) + max(map(len, rows))
        texts = [text + row for text, row in zip(texts, rows, strict=True)]
        logits = run.feed_rows(rows, last)
        assert run.lengths == [len(text) for text in texts]
        for text, k, found in zip(texts, last, logits, strict=True):
            if k:
                with torch.no_grad():
                    expected = model(torch.tensor([text])).logits[0, -k:]
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        # what was rolled back does not pile up
        assert (run.cache.length if kind == "llama" else run.cache.get_seq_length()) <= room
        run.rollback(lengths)
        texts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    run.feed_rows([[5], [6, 7], [8]], [0, 0, 0])
    run.select_rows([2, 1])
    kept = run.feed_rows([[4], [9]], [1, 1])
    for text, found in zip(([8, 4], [13, 6, 7, 9]), kept, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found[0], model(torch.tensor([text])).logits[0, -1], rtol=1e-5, atol=1e-5)


def test_rows_of_the_packaged_pair(packaged_folder):
    """https://github.com/huggingface/transformers/issues/32165 - float32, where rows may part at a tie only."""
    from specdec_lib.audit.identity import compare
    from specdec_lib.bench.prompts import load_prompts

    pair = sd.load_pair(device="cpu")
    prompts = [pair.encode(p.messages) for p in load_prompts(limit=1)[:3]]
    alone = sd.generate(pair, prompts, max_new_tokens=6)
    together = sd.generate(pair, prompts, max_new_tokens=6, batch_size=3)
    for prompt, a, b in zip(prompts, alone.tokens, together.tokens, strict=True):
        difference = compare(pair.target, prompt, a, b)
        assert difference is None or difference.tie
    assert together.stats.kept > 0


def test_the_benchmark_over_batch_sizes(tiny):
    """https://github.com/vllm-project/vllm/issues/8439 - drafting that stopped paying in large batches, unmeasured."""
    found = throughput(tiny().pair, PROMPTS[:4], (1, 4), new_tokens=6, gamma=3, repeats=1)
    assert [row["batch_size"] for row in found] == [1, 4]
    for row in found:
        ratio = row["drafted_tokens_per_second"] / row["plain_tokens_per_second"]
        assert row["speedup"] == pytest.approx(ratio) and 0 < row["outside_drafted"] < 1
