"""The target's own text, to learn from: it invents questions in many styles and answers them.

No outside corpus: each row starts from the chat template and, for some rows, the first words of a user turn
(`OPENERS`); every other token is the target's.  User turns are sampled at `QUESTION_TEMPERATURE`, assistant turns
at temperature 1 in half of the rows and greedily in the other half, because drafts serve both.  A target without
a chat template goes on from the openers, and all of its text is answer.  With every position go the target's `TOP`
most probable next tokens and their log-probabilities: the soft labels.

A shard is one batch, written atomically and seeded by its number: an interrupted run goes on with the first
shard that is missing, and shard 17 is the same whoever computes it on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ..errors import SpecdecError, first_line

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
]  # fmt: skip


@dataclass(frozen=True)
class Turns:
    """What stands between the turns of a conversation, in token ids.

    Attributes:
        start: before the first user turn.
        to_assistant: from the end of a user turn (its first id is the token that ends it) to the answer.
        to_user: from the end of an answer to the next user turn.
        ends: the ids that end a turn.
        header: what comes right before an answer; empty where all text is answer.
    """

    start: list[int]
    to_assistant: list[int]
    to_user: list[int]
    ends: list[int]
    header: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Turns:
        """Read off the tokenizer's chat template; a tokenizer without one gives plain text."""
        end = tokenizer.eos_token_id
        if end is None:
            raise SpecdecError("this tokenizer has no end-of-sequence token: name one in its tokenizer_config.json")
        if getattr(tokenizer, "chat_template", None):
            ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
            start, to_assistant, to_user = cls._between(tokenizer)
            question, answer = ids(to_assistant), ids(to_user)
            header = question[1:] or question
            return cls(ids(start), question, answer, sorted({end, question[0], answer[0]}), header)
        begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        again = [end] if begin == end else [end, begin]
        return cls([begin], again, again, [end], [])

    @staticmethod
    def _between(tokenizer: Any) -> tuple[str, str, str]:
        """The texts before the first question, from it to the answer, and from that to the next question.

        An answer begins where generation does, after the generation prompt: that may open a thought (`<think>`) which
        the template leaves out of a conversation's history, or leave out an empty one which it puts there.
        """
        messages = [
            {"role": "user", "content": "@1@"},
            {"role": "assistant", "content": "@2@"},
            {"role": "user", "content": "@3@"},
        ]
        try:
            start, rest = tokenizer.apply_chat_template(messages, tokenize=False).split("@1@")
            to_assistant, rest = rest.split("@2@")
            to_user, rest = rest.split("@3@")
            asked, bare = (
                tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=prompted)
                for prompted in (True, False)
            )
            if asked != bare:  # else the template has no generation prompt
                to_assistant = asked.split("@1@")[1]
        except Exception as error:  # the template's own, or text that does not split
            raise SpecdecError(
                f"cannot tell the turns of this tokenizer's chat template apart ({first_line(error)}): remove it"
            ) from None
        return start, to_assistant, to_user


@torch.inference_mode()
def write_shard(
    session: Any,
    tokenizer: Any,
    path: Path,
    seed: int,
    index: int,
    rows: int = ROWS,
    length: int = LENGTH,
    tick: Callable[[int], object] = lambda position: None,
) -> None:
    """Sample one batch of `rows` texts of `length` tokens into `path`.

    Args:
        session: empty, `rows` wide; `FastSession` or `TransformersSession`.
        tokenizer: the target's.
        seed, index: of the run and of the shard.
        tick: called with each position that is done.

    The file holds `tokens` `[rows, length]`, `forced` (bool, tokens that are not the target's), `top_ids` and
    `top_logprobs` `[rows, length, TOP]` of the token after each position, the last one excepted.  Ids are uint16,
    or int32 where the vocabulary is too large for that.
    """
    device = session.device
    generator = torch.Generator().manual_seed((seed << 20) + index)  # the CPU's: the same text on every device
    choice = np.random.default_rng([seed, index]).integers(len(OPENERS), size=rows)
    turns = Turns.of(tokenizer)
    openers = [tokenizer(OPENERS[c], add_special_tokens=False)["input_ids"] if OPENERS[c] else [] for c in choice]

    pending = [turns.start + opener for opener in openers]  # tokens that a row must take before it is free again
    answering = np.full(rows, not turns.header)
    greedy_answers = torch.arange(rows, device=device) % 2 == 0
    tokens = np.zeros((rows, length), np.int64)
    forced = np.zeros((rows, length), bool)
    current = None
    for t in range(length):
        if current is not None:
            logits = session.feed(current[:, None])[:, 0].float()
            logprobs = logits - logits.logsumexp(-1, keepdim=True)
            if t == 1:
                vocabulary = logits.shape[-1]
                kind = np.uint16 if vocabulary <= 1 << 16 else np.int32
                top_ids = np.zeros((rows, length, min(TOP, vocabulary)), kind)
                top_logprobs = np.zeros(top_ids.shape, np.float16)
            values, indices = logprobs.topk(top_ids.shape[-1])
            top_ids[:, t - 1] = indices.cpu().numpy().astype(kind)
            top_logprobs[:, t - 1] = values.cpu().numpy().astype(np.float16)
            in_answer = torch.from_numpy(answering).to(device)
            temperature = torch.where(in_answer, 1.0, QUESTION_TEMPERATURE)[:, None]
            cumulated = (logprobs / temperature).softmax(-1).double().cumsum(-1)
            uniform = torch.rand(rows, 1, generator=generator, dtype=torch.float64).to(device)
            sampled = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)[:, 0]
            greedy = in_answer & greedy_answers
            current = torch.where(greedy, indices[:, 0], sampled).cpu()
        else:
            current = torch.zeros(rows, dtype=torch.long)
        for r in range(rows):
            if pending[r]:
                current[r] = pending[r].pop(0)
                forced[r, t] = True
            elif int(current[r]) in turns.ends:
                # a turn that ends in another way than the template's is made to end in that
                current[r], *pending[r] = turns.to_user if answering[r] else turns.to_assistant
                answering[r] = not (answering[r] and turns.header)
        tokens[:, t] = current.numpy()
        current = current.to(device)
        tick(t)
    part = path.with_suffix(".part")
    arrays = {"tokens": tokens.astype(kind), "forced": forced, "top_ids": top_ids, "top_logprobs": top_logprobs}
    save_file({k: torch.from_numpy(v) for k, v in arrays.items()}, part)
    part.rename(path)
