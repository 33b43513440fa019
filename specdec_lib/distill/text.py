"""The target's own text, to learn from: it invents questions in many styles and answers them.

No outside corpus: each row starts from the chat template and, for some rows, the first words of a user turn
(`OPENERS`); every other token is the target's.  User turns are sampled at `QUESTION_TEMPERATURE`, assistant turns
at temperature 1 in half of the rows and greedily in the other half, because drafts serve both.  With every
position go the target's `TOP` most probable next tokens and their log-probabilities: the soft labels.

A shard is one batch, written atomically and seeded by its number: an interrupted run goes on with the first
shard that is missing, and shard 17 is the same whoever computes it on the same machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

TOP = 64
ROWS, LENGTH = 96, 448
QUESTION_TEMPERATURE = 0.8  # sharper than 1, so that the questions stay questions

OPENERS = [
    "", "", "", "", "", "", "", "", "", "", "", "",
    "What", "Who", "When", "Where", "Why", "How", "Which", "Is", "Can you", "Could you", "Please", "I", "My",
    "Explain", "Describe", "Write", "Give me", "Tell me about", "Compare", "List", "Suggest", "Imagine",
    "Translate the following sentence into French:", "Translate into German:", "Translate this to Spanish:",
    "Translate the text below from German to English:", "How do you say in Italian:", "Translate to English:",
    "Summarize the following text:", "Summarize this article in two sentences:", "Give a short summary of:",
    "Summarize the passage below.\n\n", "What are the key points of this text?\n\n", "TL;DR:\n\n",
    "Answer the question in one sentence:", "Answer briefly:", "Question:", "Q:", "Who was", "What is the capital",
    "Solve this problem step by step:", "A shop sells", "If a train", "Calculate", "How many", "Tom has", "Find the",
    "Sarah buys", "What is the value of", "A rectangle has", "There are", "The price of",
    "Use the passage to answer the question.\n\nPassage:", "Context:", "Given the documents below,", "According to",
    "Read the following documents and answer.\n\nDocument 1:", "Based on the text, answer the question.\n\nText:",
    "Write an email to", "Write a story about", "Write a Python function that", "Help me plan", "Rewrite", "Act as",
]


@torch.inference_mode()
def write_shard(session, tokenizer, path: Path, seed: int, index: int, rows: int = ROWS, length: int = LENGTH) -> None:
    """Sample one batch of `rows` texts of `length` tokens from `session` (empty, `rows` wide) into `path`."""
    device = session.device
    generator = torch.Generator(device).manual_seed((seed << 20) + index)
    choice = np.random.default_rng([seed, index]).integers(len(OPENERS), size=rows)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], tokenize=False).split("@")[0]
    to_user, to_assistant = ids("\n<|im_start|>user\n"), ids("\n<|im_start|>assistant\n")
    end = tokenizer.eos_token_id

    pending = [ids(start) + ids(OPENERS[c]) for c in choice]  # tokens that a row must take before it is free again
    answering = np.zeros(rows, bool)
    greedy_answers = torch.arange(rows, device=device) % 2 == 0
    tokens = np.zeros((rows, length), np.uint16)
    forced = np.zeros((rows, length), bool)
    top_ids = np.zeros((rows, length, TOP), np.uint16)
    top_logprobs = np.zeros((rows, length, TOP), np.float16)
    current = None
    for t in range(length):
        if current is not None:
            logits = session.feed(current[:, None])[:, 0].float()
            logprobs = logits - logits.logsumexp(-1, keepdim=True)
            values, indices = logprobs.topk(TOP)
            top_ids[:, t - 1] = indices.cpu().numpy().astype(np.uint16)
            top_logprobs[:, t - 1] = values.cpu().numpy().astype(np.float16)
            in_answer = torch.from_numpy(answering).to(device)
            temperature = torch.where(in_answer, 1.0, QUESTION_TEMPERATURE)[:, None]
            cumulated = (logprobs / temperature).softmax(-1).double().cumsum(-1)
            uniform = torch.rand(rows, 1, generator=generator, device=device, dtype=torch.float64)
            sampled = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)[:, 0]
            greedy = in_answer & greedy_answers
            current = torch.where(greedy, indices[:, 0], sampled).cpu()
        else:
            current = torch.zeros(rows, dtype=torch.long)
        for r in range(rows):
            if pending[r]:
                current[r] = pending[r].pop(0)
                forced[r, t] = True
            elif current[r] == end:
                answering[r] = not answering[r]
                pending[r] = list(to_assistant if answering[r] else to_user)
        tokens[:, t] = current.numpy()
        current = current.to(device)
    part = path.with_suffix(".part")
    arrays = {"tokens": tokens, "forced": forced, "top_ids": top_ids, "top_logprobs": top_logprobs}
    save_file({k: torch.from_numpy(v) for k, v in arrays.items()}, part)
    part.rename(path)
