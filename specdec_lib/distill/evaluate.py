"""What a draft is worth on the benchmark's prompts, under teacher forcing.

The target answers each prompt twice, greedily and at temperature 1.  On the greedy text counts whether the draft
has the same most probable token; on the sampled one the overlap `sum_x min(p(x), q(x))` of the two laws over the
whole vocabulary, which is the probability that a draft token is kept (Theorem 3.5).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bench.prompts import Prompt
from ..decode import generate_plain
from ..distributions import overlap, softmax
from ..drafters import NGramDrafter, SharedVocabularyDrafter
from ..errors import SpecdecError
from ..models import Pair, open_session
from ..models.feature_draft import FeatureDraft
from ..models.pair import vocabulary_size
from ..models.session import FastSession
from .features import drafted_logits

POSITIONS = 8


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's two answers, in token ids."""

    id: str
    kind: str
    prompt: list[int]
    greedy: list[int]
    sampled: list[int]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The ids of a prompt: by the chat template, or the turns as paragraphs where there is none."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer("\n\n".join(m["content"] for m in prompt.messages))["input_ids"]


def target_answers(
    pair: Pair,
    prompts: Sequence[Prompt],
    file: Path,
    max_new_tokens: int,
    seed: int = 0,
    tick: Callable[[float], object] = lambda share: None,
) -> list[Answer]:
    """The target's answers, one at a time into `file`: what is there already is not computed again.

    Args:
        pair: target and tokenizer.
        prompts: the benchmark's.
        file: JSON lines; of this target, length and seed, since a line is known by its prompt alone.
        max_new_tokens: length of each answer, if no end-of-sequence token comes first.
        seed: of the sampled answers.
        tick: called with the share that is done.
    """
    known = {(a.id, tuple(a.prompt)): a for a in _read(file)}
    answers = []
    for number, prompt in enumerate(prompts):
        tick(number / len(prompts))
        ids = encode(pair.tokenizer, prompt)
        answer = known.get((prompt.id, tuple(ids)))
        if answer is None:
            own = seed + zlib.crc32(prompt.id.encode())  # a stream of its own, whichever prompts come before it
            greedy, sampled = (
                generate_plain(pair, ids, max_new_tokens, temperature=t, seed=own).tokens[0] for t in (0.0, 1.0)
            )
            answer = Answer(prompt.id, prompt.kind, ids, greedy, sampled)
            with open(file, "a", encoding="utf-8") as lines:
                lines.write("\n" + json.dumps(asdict(answer)))
        answers.append(answer)
    return answers


def _read(file: Path) -> list[Answer]:
    answers = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # empty, or the torn line of a run that was killed
    return answers


def draft_logits(draft: Any, ids: Sequence[int], last: int, vocabulary: int) -> torch.Tensor:
    """Logits after the last `last` of `ids`, `[last, vocabulary]`: of a model, of a table (0 and minus infinity), or
    of a draft with other tokens, all on token 0 where it cannot say anything.
    """
    if isinstance(draft, SharedVocabularyDrafter):
        shared = draft.start(vocabulary)
        nothing = torch.full((vocabulary,), -torch.inf).index_fill(0, torch.tensor([0]), 0)
        found = [shared.logits(list(ids[:end])) for end in range(len(ids) - last + 1, len(ids) + 1)]
        return torch.stack([nothing if logits is None else logits.float().cpu() for logits in found])
    if isinstance(draft, NGramDrafter):
        reach = max(draft.order - 1, 1)
        tokens = [draft.following(ids[max(end - reach, 0) : end]) for end in range(len(ids) - last + 1, len(ids) + 1)]
        return torch.full((last, vocabulary), -torch.inf).scatter_(1, torch.tensor(tokens)[:, None], 0)
    session = open_session(draft, capacity=len(ids))
    return session.feed(torch.tensor([list(ids)], device=session.device), last=last)[0].float()


def read(target: Any, ids: Sequence[int], last: int, watched: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's logits after the last `last` of `ids`, and its hidden states `[len(ids), len(watched), width]`."""
    session = open_session(target, capacity=len(ids))
    if not isinstance(session, FastSession):
        raise SpecdecError("a draft on the target's features needs a Llama or Qwen2: use a draft of another kind")
    session.capture_hidden(watched)
    logits = session.feed(torch.tensor([list(ids)], device=session.device), last=last)[0].float()
    return logits, session.cache.features[0, : len(ids)]


def evaluate_draft(
    target: Any, draft: Any, answers: Sequence[Answer], tick: Callable[[float], object] = lambda share: None
) -> dict:
    """Agreement with the target's greedy text and overlap on its sampled text.

    Returns:
        `agreement` and `overlap`, means over all tokens; `by_position`, see there; `kinds`, the two means by kind;
        `tokens`, how many of greedy and of sampled text.
    """
    vocabulary = vocabulary_size(target)
    agreements: dict[str, list[np.ndarray]] = {}
    overlaps: dict[str, list[np.ndarray]] = {}
    runs: list[list[np.ndarray]] = []
    for number, answer in enumerate(answers):
        tick(number / len(answers))
        ids, count = answer.prompt + answer.greedy, len(answer.greedy)
        if isinstance(draft, FeatureDraft):
            _, features = read(target, ids[:-1], count, draft.config.watched)
            proposed = [q.argmax(-1) for q in drafted_logits(draft, features, ids, count, POSITIONS)]
        else:
            said = draft_logits(draft, ids[:-1], count, vocabulary).argmax(-1)
            proposed = [said[position:] for position in range(POSITIONS)]
        runs.append([x.cpu().numpy() == np.array(answer.greedy[k:]) for k, x in enumerate(proposed)])
        agreements.setdefault(answer.kind, []).append(runs[-1][0])
        ids, count = answer.prompt + answer.sampled, len(answer.sampled)
        if isinstance(draft, FeatureDraft):
            logits, features = read(target, ids[:-1], count, draft.config.watched)
            (proposals,) = drafted_logits(draft, features, ids, count, steps=1)
        else:
            logits = draft_logits(target, ids[:-1], count, vocabulary)
            proposals = draft_logits(draft, ids[:-1], count, vocabulary)
        p, q = softmax(logits), softmax(proposals).to(logits.device)
        overlaps.setdefault(answer.kind, []).append(overlap(p, q).cpu().numpy())
    greedy = [text for texts in agreements.values() for text in texts]
    sampled = [text for texts in overlaps.values() for text in texts]
    mean = lambda arrays: round(float(np.concatenate(arrays).mean()), 4)  # noqa: E731
    return {
        "agreement": mean(greedy),
        "overlap": mean(sampled),
        "by_position": by_position(runs),
        "kinds": {kind: {"agreement": mean(agreements[kind]), "overlap": mean(overlaps[kind])} for kind in agreements},
        "tokens": {"greedy": sum(map(len, greedy)), "sampled": sum(map(len, sampled))},
    }


def by_position(runs: Sequence[Sequence[np.ndarray]]) -> list[float]:
    """Of the drafts whose first `i - 1` tokens agreed, the share whose `i`-th does, for `i = 1, 2, ...`.

    A draft that starts anywhere in a text is counted.  While it agrees, its own prefix is the text's, so that the
    agreements under teacher forcing are those of free drafts.

    Args:
        runs: of each text, for each position of a draft, bool `[starts]`: whether the token agrees there.

    >>> text = np.array([True, True, False, True])
    >>> by_position([[text, text[1:], text[2:]]])  # 3 of 4; of the starts 1, 2 and 4 the first and second go on: 1 of 2
    [0.75, 0.5, 0.0]
    """
    result = []
    agreed = [np.ones(len(run[0]), bool) for run in runs]  # by start: all positions before the current one
    for position in range(max(map(len, runs))):
        here = [run[position] if position < len(run) else np.zeros(0, bool) for run in runs]
        agreed = [starts[: len(now)] for starts, now in zip(agreed, here, strict=True)]
        tested = sum(int(starts.sum()) for starts in agreed)
        if not tested:
            break
        agreed = [starts & now for starts, now in zip(agreed, here, strict=True)]
        result.append(round(sum(int(starts.sum()) for starts in agreed) / tested, 4))
    return result
