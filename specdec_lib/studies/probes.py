"""What each option does in transformers' assisted generation and here: faults first, then options.

A probe asks for one thing on both sides and looks at what comes out, so its verdict is that of the *installed*
release.  What was seen in transformers 5.24.0 is kept beside it: where the two differ, a fault was mended, or a new
one made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
import transformers

from ..decode import Round, generate, generate_plain
from ..decode.draft_length import Confidence
from ..drafters import (
    ComposedDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SharedVocabularyDrafter,
    TextDrafter,
)
from ..errors import first_line
from ..models.pair import Pair, fast
from ..verify.lossy import ensemble
from .both_sides import (  # fmt: skip
    BREAKS,
    HONOURED,
    IGNORED,
    LENGTH,
    LETTERS,
    PROBES,
    PROMPT,
    REFUSED,
    WORDS,
    Outcome,
    Side,
    drafting,
    honoured,
    letters,
    look,
    noisy,
    ours_of,
    probe,
    text_of,
    tiny,
    traced,
    written,
)

__all__ = ["PROBES", "WORDS", "look"]

# -- faults ------------------------------------------------------------------------------------------------


@probe("early exit, then an error", BREAKS)
def early_exit() -> tuple[Side, Side]:
    def outcome(before: list[int], after: list[int], layers: int) -> Outcome:
        text = "the same text" if before == after else "another text"
        return honoured(before == after, f"the model has 2 layers before and {layers} after; plain decoding: {text}")

    def theirs() -> Outcome:
        model = tiny()
        before = written(model, PROMPT)
        with suppress(Exception):
            written(model, PROMPT, assistant_early_exit=1, stop_strings="zzzz", tokenizer=letters())
        return outcome(before, written(model, PROMPT), model.config.num_hidden_layers)

    def ours() -> Outcome:
        def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("in the middle of a draft")

        model = tiny()
        pair = Pair(fast(model), EarlyExitDrafter(1))
        before = text_of(pair)
        with suppress(RuntimeError):
            text_of(pair, processors=[fails])
        return outcome(before, generate_plain(pair, PROMPT, LENGTH, eos=[]).tokens[0], model.config.num_hidden_layers)

    return theirs, ours


@probe("stop string, with a draft model", REFUSED)
def stop_with_model() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        asked: dict[str, Any] = {"assistant_model": noisy(), "tokenizer": letters()}
        return stops_right(lambda s, ids, at: written(tiny(s), ids, stop_strings=at, **asked))

    def ours() -> Outcome:
        return stops_right(lambda s, ids, at: text_of(ours_of(noisy(), letters(), s), ids, stop=at))

    return theirs, ours


@probe("stop string, with prompt lookup", BREAKS)
def stop_with_lookup() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        asked: dict[str, Any] = {"prompt_lookup_num_tokens": 5, "tokenizer": letters()}
        return stops_right(lambda s, ids, at: written(tiny(s), ids, stop_strings=at, **asked))

    def ours() -> Outcome:
        return stops_right(lambda s, ids, at: text_of(ours_of(PromptLookupDrafter(), letters(), s), ids, stop=at))

    return theirs, ours


def stops_right(decode: Callable[[int, list[int], str], list[int]]) -> Outcome:
    """Whether a text ends where plain decoding first completes the stop string, over several targets.

    The prompt is followed by the target's own text until it repeats itself, so that lookup is often right.
    """
    right = cases = 0
    for seed in (0, 1, 4, 5):
        text = written(tiny(seed), PROMPT, max_new_tokens=60 + LENGTH)
        prompt, plain = PROMPT + text[:60], text[60:]
        for start in (4, 9):
            stop = letters().decode(plain[start : start + 2])
            wanted = next(n for n in range(LENGTH + 1) if stop in letters().decode(plain[:n]))
            right += decode(seed, prompt, stop) == plain[:wanted]
            cases += 1
    return honoured(right == cases, f"the right end in {right} of {cases} texts")


@probe("a stopping criterion of one's own", BREAKS)
def criterion() -> tuple[Side, Side]:
    end = len(PROMPT) + 13

    class Enough(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= end])

    def outcome(new: list[int]) -> Outcome:
        return honoured(len(new) == 13, f"asked to end at 13 tokens, ends at {len(new)}")

    draft = lambda: drafting(tiny(), 4)  # noqa: E731 - the target itself: every block is accepted whole
    criteria = transformers.StoppingCriteriaList([Enough()])
    return (
        lambda: outcome(written(tiny(), PROMPT, assistant_model=draft(), stopping_criteria=criteria)),
        lambda: outcome(text_of(ours_of(draft()), gamma=4, criteria=criteria)),
    )


OTHER = "0123456789"  # letters that only the draft's tokenizer has


def two() -> dict[str, Any]:
    """Both tokenizers, new ones: transformers remembers the first draft of a pair that it has met."""
    return {"tokenizer": letters(), "assistant_tokenizer": letters(OTHER)}


def foreign() -> Any:
    return drafting(tiny(3, vocabulary=len(LETTERS + OTHER)), 3)


def shared(draft: Any) -> Pair:
    return ours_of(SharedVocabularyDrafter(draft, letters(OTHER), letters()))


@probe("another tokenizer, sampling: the draft afterwards", BREAKS)
def other_tokenizer() -> tuple[Side, Side]:
    def used(decode: Callable[[Any], Any]) -> Outcome:
        draft = foreign()
        draft.generation_config.repetition_penalty = 1.3
        state = lambda: (draft(torch.tensor([PROMPT])).logits.shape[-1], draft.generation_config.repetition_penalty)  # noqa: E731
        before = state()
        decode(draft)
        after = state()
        return honoured(before == after, f"its logits and repetition penalty: {before} before, {after} after")

    return (
        lambda: used(lambda draft: written(tiny(), PROMPT, assistant_model=draft, do_sample=True, **two())),
        lambda: used(lambda draft: text_of(shared(draft), temperature=1.0)),
    )


@probe("another tokenizer, sampling: a second draft", BREAKS)
def second_draft() -> tuple[Side, Side]:
    how = two()

    def twice(decode: Callable[[], list[int]]) -> Outcome:
        texts = [decode() for _ in range(2)]
        return honoured(all(len(text) == LENGTH for text in texts), "two texts")

    return (
        lambda: twice(lambda: written(tiny(), PROMPT, assistant_model=foreign(), do_sample=True, **how)),
        lambda: twice(lambda: text_of(shared(foreign()), temperature=1.0)),
    )


@probe("another tokenizer, greedy", HONOURED)
def other_tokenizer_greedy() -> tuple[Side, Side]:
    def outcome(new: list[int]) -> Outcome:
        return honoured(new == written(tiny(), PROMPT), "the plain text")

    return (
        lambda: outcome(written(tiny(), PROMPT, assistant_model=foreign(), **two())),
        lambda: outcome(text_of(ours_of(TextDrafter(foreign(), letters(OTHER), letters())))),
    )


@probe("same tokenizer, padded vocabulary, sampling", BREAKS)
def padded() -> tuple[Side, Side]:
    def outcome(new: list[int]) -> Outcome:
        return honoured(len(new) == LENGTH, f"{len(new)} tokens")

    how = {"tokenizer": letters(), "assistant_tokenizer": letters(), "do_sample": True}
    wide = lambda: drafting(tiny(3, vocabulary=len(LETTERS) + 5), 3)  # noqa: E731
    return (
        lambda: outcome(written(tiny(), PROMPT, assistant_model=wide(), **how)),
        lambda: outcome(text_of(ours_of(ModelDrafter(wide())), temperature=1.0)),
    )


@probe("ensemble verification: the law of the mixture", BREAKS)
def mixture() -> tuple[Side, Side]:
    # with one token left to each model the two laws are point masses; a mixture that is nearly all draft writes
    # the draft's favourite everywhere.  The last token is never drafted
    weight = 1e-6

    def outcome(new: list[int]) -> Outcome:
        draft, texts = tiny(1), [PROMPT + new[:i] for i in range(LENGTH - 1)]
        favourites = [int(draft(torch.tensor([ids])).logits[0, -1].argmax()) for ids in texts]
        right = sum(a == b for a, b in zip(new, favourites, strict=False))
        return honoured(right == LENGTH - 1, f"{right} of {LENGTH - 1} tokens are what the mixture would write")

    def theirs() -> Outcome:
        how: dict[str, Any] = {"do_sample": True, "top_k": 1, "assistant_ensemble_weight": weight}
        return outcome(written(tiny(), PROMPT, assistant_model=drafting(tiny(1), 2), **how))

    def ours() -> Outcome:
        rule = ensemble(weight, "none")
        return outcome(text_of(ours_of(tiny(1)), gamma=2, verifier=rule, temperature=1.0, top_k=1))

    return theirs, ours


@probe("a uniform that is exactly 0", BREAKS)
def zero_uniform() -> tuple[Side, Side]:
    # with one token left to the target, any other token has probability 0
    def outcome(new: list[int]) -> Outcome:
        target, texts = tiny(), [PROMPT + new[:i] for i in range(LENGTH)]
        favourites = [int(target(torch.tensor([ids])).logits[0, -1].argmax()) for ids in texts]
        wrong = sum(a != b for a, b in zip(new, favourites, strict=True))
        return honoured(not wrong, f"{wrong} of {LENGTH} tokens have probability 0")

    def theirs() -> Outcome:
        with patch.object(torch, "rand_like", torch.zeros_like):
            return outcome(written(tiny(), PROMPT, assistant_model=drafting(tiny(1), 2), do_sample=True, top_k=1))

    def ours() -> Outcome:
        with patch("random.Random.random", lambda self: 0.0):
            return outcome(text_of(ours_of(tiny(1)), gamma=2, temperature=1.0, top_k=1))

    return theirs, ours


@probe("how many draft tokens were accepted", IGNORED)
def statistics() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        ids = torch.tensor([PROMPT])
        out = tiny().generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=noisy(), max_new_tokens=LENGTH, do_sample=False,
            return_dict_in_generate=True, output_scores=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        told = [key for key in out if any(word in key for word in ("accept", "match", "draft", "candidate", "assist"))]
        return honoured(bool(told), f"the result has {', '.join(out)}", IGNORED)

    def ours() -> Outcome:
        stats = generate(ours_of(noisy()), PROMPT, max_new_tokens=LENGTH, eos=[]).stats
        return honoured(stats.drafted > 0, f"{stats.accepted} of {stats.drafted}")

    return theirs, ours


# -- options -----------------------------------------------------------------------------------------------


@probe("draft length, given to the call", IGNORED)
def draft_length() -> tuple[Side, Side]:
    def outcome(rounds: list[Round]) -> Outcome:
        longest = max(len(r.drafted) for r in rounds)
        return honoured(longest == 3, f"asked for 3, drafts up to {longest}", IGNORED)

    return (
        lambda: outcome(traced(tiny(), PROMPT, assistant_model=noisy(), num_assistant_tokens=3)[1]),
        lambda: outcome(generate(ours_of(noisy()), PROMPT, gamma=3, max_new_tokens=LENGTH, eos=[]).trace),
    )


@probe("confidence threshold, switched off (None)", IGNORED)
def threshold() -> tuple[Side, Side]:
    def outcome(rounds: list[Round]) -> Outcome:
        early = left = 0
        for r in reversed(rounds):
            left += len(r.emitted)
            early += len(r.drafted) < min(5, left - 1)  # near the end no more is drafted than can be used
        return honoured(not early, f"{early} of {len(rounds)} drafts end early", IGNORED)

    def theirs() -> Outcome:
        draft = noisy()
        draft.generation_config.assistant_confidence_threshold = None
        return outcome(traced(tiny(), PROMPT, assistant_model=draft)[1])

    def ours() -> Outcome:
        rule = Confidence(0.0, longest=5)
        return outcome(generate(ours_of(noisy()), PROMPT, gamma=rule, max_new_tokens=LENGTH, eos=[]).trace)

    return theirs, ours


@probe("a misspelt rule for the draft length", IGNORED)
def schedule() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        draft = noisy()
        draft.generation_config.num_assistant_tokens_schedule = "heuristik"
        return Outcome(IGNORED, f"{len(written(tiny(), PROMPT, assistant_model=draft))} tokens, and nothing is said")

    return theirs, lambda: Outcome(IGNORED, f"{len(text_of(ours_of(noisy()), gamma='heuristik'))} tokens")


@probe("an ensemble weight, and no draft", IGNORED)
def weight_alone() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        return Outcome(IGNORED, f"{len(written(tiny(), PROMPT, assistant_ensemble_weight=0.5))} tokens, of the target")

    return theirs, lambda: Outcome(IGNORED, f"{len(text_of(ours_of(), verifier=ensemble(0.5)))} tokens")


@probe("prompt lookup and a draft model together", IGNORED)
def lookup_and_model() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        draft, calls = noisy(), []
        draft.register_forward_pre_hook(lambda *_: calls.append(1))
        written(tiny(), PROMPT, assistant_model=draft, prompt_lookup_num_tokens=5)
        return honoured(bool(calls), f"the draft model runs {len(calls)} times", IGNORED)

    def ours() -> Outcome:
        both = ComposedDrafter([PromptLookupDrafter(), ModelDrafter(noisy())])
        passes = generate(ours_of(both), PROMPT, max_new_tokens=LENGTH, eos=[]).stats.draft_passes
        return honoured(passes > 0, f"the draft model runs {passes} times", IGNORED)

    return theirs, ours


@probe("beam search with a draft", IGNORED)
def beams() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        draft, calls = noisy(), []
        draft.register_forward_pre_hook(lambda *_: calls.append(1))
        written(tiny(), PROMPT, assistant_model=draft, num_beams=2)
        return honoured(bool(calls), f"the draft model runs {len(calls)} times; the log has a warning", IGNORED)

    def ours() -> Outcome:
        try:
            return honoured(bool(text_of(ours_of(noisy()), num_beams=2)), "a text")
        except TypeError as error:  # Python's own refusal
            return Outcome(REFUSED, first_line(error))

    return theirs, ours


@probe("several prompts at once", REFUSED)
def batch() -> tuple[Side, Side]:
    def theirs() -> Outcome:
        ids = torch.tensor([PROMPT, PROMPT[::-1]])
        how: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
        out = tiny().generate(ids, attention_mask=torch.ones_like(ids), assistant_model=noisy(), **how)
        return honoured(len(out) == 2, f"{len(out)} texts")

    def ours() -> Outcome:
        prompts = [PROMPT, PROMPT[::-1][:4]]
        out = generate(ours_of(noisy()), prompts, max_new_tokens=LENGTH, eos=[], batch_size=2)
        same = out.tokens == [written(tiny(), ids) for ids in prompts]
        return honoured(same, "two texts of unequal prompts, each the plain one" if same else "other texts")

    return theirs, ours


@probe("a draft whose context is shorter than the text", BREAKS)
def short_context() -> tuple[Side, Side]:
    def short() -> Any:
        shape: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 20}
        config = transformers.GPT2Config(vocab_size=len(LETTERS), bos_token_id=1, eos_token_id=None, **shape)
        return drafting(transformers.GPT2LMHeadModel(config).double().eval(), 3)

    def outcome(new: list[int]) -> Outcome:
        return honoured(new == written(tiny(), PROMPT), "the plain text")

    return (
        lambda: outcome(written(tiny(), PROMPT, assistant_model=short())),
        lambda: outcome(text_of(ours_of(short()), gamma=3)),
    )


@probe("repetition penalty", HONOURED)
def penalty() -> tuple[Side, Side]:
    plain = written(tiny(), PROMPT, repetition_penalty=1.5)
    process = transformers.RepetitionPenaltyLogitsProcessor(1.5)

    def outcome(new: list[int]) -> Outcome:
        return honoured(new == plain != written(tiny(), PROMPT), "the plain text under the same penalty")

    return (
        lambda: outcome(written(tiny(), PROMPT, assistant_model=noisy(), repetition_penalty=1.5)),
        lambda: outcome(text_of(ours_of(noisy()), processors=[process])),
    )


@probe("an end token inside a block", HONOURED)
def end_token() -> tuple[Side, Side]:
    plain = written(tiny(), PROMPT)
    last_new = max(plain.index(token) for token in plain)  # a token that did not occur before it
    end, wanted = plain[last_new], plain[: last_new + 1]
    perfect = lambda: drafting(tiny(), 5)  # noqa: E731

    def outcome(new: list[int]) -> Outcome:
        return honoured(new == wanted, f"ends at token {len(new)}, plain decoding at {len(wanted)}")

    return (
        lambda: outcome(written(tiny(), PROMPT, assistant_model=perfect(), eos_token_id=end)),
        lambda: outcome(text_of(ours_of(perfect()), eos=[end])),
    )
