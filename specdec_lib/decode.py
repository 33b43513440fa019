"""Decoding: speculative, several tokens a target pass, and plain, one.  What a call may ask for is checked here.

The loop itself is in `rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from time import perf_counter
from typing import Any

import torch

from .drafters import Drafter, Sampling, as_drafter
from .errors import SpecdecError
from .lengths import Constant, Lengths, as_lengths, check_gamma
from .models.pair import Pair, context_length, end_tokens, is_encoder_decoder, start_marker, vocabulary_size
from .models.seq2seq import DecoderView, start_token
from .models.session import device_of
from .processing import NoEndBefore, as_processors
from .results import Generation, Round, Stats, summarise
from .rounds import GREEDY, Call, Row, decode_together
from .several import check_several, decode_several
from .stopping import Stopping, TextStream, as_tuple
from .verify import VERIFIERS, Verifier, get_verifier

__all__ = ["Generation", "Round", "Stats", "as_list", "check_lengths", "generate", "generate_plain", "summarise"]

TOKEN = VERIFIERS["token"]


def generate(
    pair: Pair,
    prompts: Any,
    gamma: int | Lengths = 5,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    verifier: str | Verifier = "token",
    seed: int = 0,
    eos: list[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
    *,
    min_new_tokens: int = 0,
    stop: str | Sequence[str] | None = None,
    criteria: Any = None,
    processors: Any = None,
    logprobs: bool = False,
    on_text: Callable[[int, str], None] | None = None,
    batch_size: int = 1,
    drafts: int = 1,
) -> Generation:
    """Decode speculatively: the draft proposes up to `gamma` tokens a round, the target verifies them in one pass.

    Args:
        pair: target, draft, tokenizer.
        prompts: a text, a list of texts, chat messages, a list of those, ids, or a tensor of ids.
        gamma: draft length, >= 1, or a rule of `specdec_lib.lengths` that adapts it.  The last rounds draft less:
            never more than can still be used.
        max_new_tokens: >= 0; exactly so many unless something ends the text before.  None goes on to the end of the
            target's context.
        temperature, top_k, top_p, min_p: see `Sampling`; the same for target and draft.
        verifier: a name in `specdec_lib.verify.VERIFIERS`, or a `Verifier`.
        seed: of a generator of its own; row `i` draws from stream `(seed, i)`, so that a text does not depend on
            its neighbours.  The same seed gives the same text; plain decoding with it draws another one.
        eos: ids that end a text; None takes the model's, `[]` runs to `max_new_tokens`.
        on_round: called after each round, for example to show it.
        min_new_tokens: end-of-sequence ids have probability 0 before so many new tokens.  Stop strings and criteria
            end a text earlier all the same, as in transformers.
        stop: strings that end a text.  Searched in the new text after each token, also across tokens; `texts` stop
            before the string, `tokens` with the token that completes it.
        criteria: transformers' `StoppingCriteria`, one or a list, or functions like them; asked after each new token.
        processors: transformers' logits processors, one or a list, or functions like them; see `processing`.  They
            change the target's law, and a draft model's with it.  For an encoder-decoder they and the criteria see
            what transformers shows them: the decoder's start token and the output, not the source.
        logprobs: keep `Generation.logprobs` and `Generation.scores`.
        on_text: called with `(row, text)` as text becomes final; what it got, joined, is the row's text.
        batch_size: how many prompts are decoded together.  Each accepts, rolls back and ends on its own; float
            rounding apart, its text is that of batch size 1.
        drafts: how many drafts of the same length are drawn independently in each round and checked in one pass; see
            `several`.  Above temperature 0, under the token rule, one prompt at a time.

    Raises:
        SpecdecError: for input that cannot be used, before any decoding.
    """
    if pair.draft is None:
        raise SpecdecError("this pair has no draft: set Pair(draft=...), or call generate_plain")
    lengths = as_lengths(gamma)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    rule = get_verifier(verifier)
    if rule is GREEDY and not sampling.greedy:
        raise SpecdecError(
            "the greedy verifier decodes the most probable token: set temperature=0, or use verifier='token'"
        )
    if rule.at_zero and not sampling.greedy:
        raise SpecdecError(f"{rule.name} is a rule for temperature 0: set temperature=0, or use another verifier")
    drafter = as_drafter(pair.draft)
    _check_count("drafts", drafts, least=1)
    if drafts > 1:
        check_several(drafter, sampling, rule, batch_size)
    if rule is TOKEN and sampling.greedy:
        rule = GREEDY  # the same law at temperature 0, without computing probabilities
    if lengths.confidence:
        if not hasattr(drafter, "with_confidence"):
            raise SpecdecError(
                f"{type(drafter).__name__} knows no confidence that a threshold could end a draft by: "
                "use another rule for gamma, or a draft model"
            )
        drafter = drafter.with_confidence(lengths.confidence)
    if rule.next_law and getattr(drafter, "confidence", False):
        # of the token past the draft only the law may be used, and here it decided where the draft ends
        raise SpecdecError(f"{rule.name} needs drafts whose length does not depend on their tokens: use no confidence")
    return _run(
        pair, prompts, drafter, lengths, max_new_tokens, sampling, rule, seed, eos, on_round,
        min_new_tokens, stop, criteria, processors, logprobs, on_text, batch_size, drafts,
    )  # fmt: skip


def generate_plain(
    pair: Pair,
    prompts: Any,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos: list[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
    *,
    min_new_tokens: int = 0,
    stop: str | Sequence[str] | None = None,
    criteria: Any = None,
    processors: Any = None,
    logprobs: bool = False,
    on_text: Callable[[int, str], None] | None = None,
    batch_size: int = 1,
) -> Generation:
    """Decode one token a target pass: the baseline of the same target.  Arguments as in `generate`."""
    sampling = Sampling(temperature, top_k, top_p, min_p)
    rule = GREEDY if sampling.greedy else TOKEN
    return _run(
        pair, prompts, None, Constant(1), max_new_tokens, sampling, rule, seed, eos, on_round,
        min_new_tokens, stop, criteria, processors, logprobs, on_text, batch_size,
    )  # fmt: skip


def check_lengths(gamma: int, max_new_tokens: int) -> None:
    """Refuse a draft length below 1 and a negative number of tokens."""
    check_gamma(gamma)
    _check_count("max_new_tokens", max_new_tokens)


def _check_count(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecdecError(f"{name} must be a whole number >= {least}, got {value!r}")


def _run(
    pair: Pair,
    prompts: Any,
    drafter: Drafter | None,
    lengths: Lengths,
    max_new_tokens: int | None,
    sampling: Sampling,
    rule: Verifier,
    seed: int,
    eos: list[int] | None,
    on_round: Callable[[Round], None] | None,
    min_new_tokens: int,
    stop: str | Sequence[str] | None,
    criteria: Any,
    processors: Any,
    logprobs: bool,
    on_text: Callable[[int, str], None] | None,
    batch_size: int,
    drafts: int = 1,
) -> Generation:
    if max_new_tokens is not None:
        _check_count("max_new_tokens", max_new_tokens)
    _check_count("min_new_tokens", min_new_tokens)
    _check_count("batch_size", batch_size, least=1)
    if on_text is not None and pair.tokenizer is None:
        raise SpecdecError("on_text needs a tokenizer: set Pair(tokenizer=...), or use on_round")
    if batch_size > 1 and getattr(drafter, "one_text", False):
        raise SpecdecError(f"{type(drafter).__name__} drafts for one text at a time: leave out batch_size")
    ends = end_tokens(pair) if eos is None else _checked_ends(eos, vocabulary_size(pair.target))
    stopping = Stopping.of(pair.tokenizer, ends, stop, criteria, device_of(pair.target))
    asked = as_processors(processors)
    if is_encoder_decoder(pair.target):
        view = partial(DecoderView, marker=start_marker(pair.target), start=start_token(pair.target))
        asked = tuple(map(view, asked))
        stopping = replace(stopping, criteria=tuple(map(view, stopping.criteria)))
    rows = []
    for index, ids in enumerate([pair.encode(p) for p in as_list(prompts)]):
        length = _new_tokens(len(ids), context_length(pair.target), max_new_tokens, min_new_tokens)
        first = (NoEndBefore(len(ids) + min_new_tokens, tuple(ends)),) if min_new_tokens and ends else ()
        how = replace(sampling, processors=(*first, *asked)) if first or asked else sampling
        at_end = "context" if max_new_tokens is None else "length"
        rows.append(Row(index, list(ids), len(ids), length, how, Random(f"{seed}/{index}"), at_end))

    start = perf_counter()
    call = Call(pair.target, drafter, lengths.start(), rule, stopping, logprobs)
    tidies = bool(getattr(pair.tokenizer, "clean_up_tokenization_spaces", False))
    streams = [TextStream(stopping, tidies) for _ in rows]
    traces: list[list[Round]] = [[] for _ in rows]
    for i in range(0, len(rows), batch_size):
        together = rows[i : i + batch_size]
        decoding = decode_several(call, together[0], drafts) if drafts > 1 else decode_together(call, together)
        for done in decoding:
            traces[done.row].append(done)
            if on_round is not None:
                on_round(done)
            if on_text is not None and (new := streams[done.row].piece(done.emitted, bool(rows[done.row].ended))):
                on_text(done.row, new)
    seconds = perf_counter() - start
    return _result(rows, traces, stopping, seconds)


def _checked_ends(eos: Any, vocabulary: int) -> tuple[int, ...]:
    ends = as_tuple(eos)
    if bad := [e for e in ends if isinstance(e, bool) or not isinstance(e, int) or not 0 <= e < vocabulary]:
        raise SpecdecError(f"eos must be ids below the vocabulary's {vocabulary}, got {bad[0]!r}: give [] for none")
    return ends


def _result(rows: list[Row], traces: list[list[Round]], stopping: Stopping, seconds: float) -> Generation:
    tokens = [row.tokens for row in rows]
    parts = [
        summarise(trace, int(row.start > 1 and bool(trace)), row.read_seconds + sum(r.seconds for r in trace))
        for row, trace in zip(rows, traces, strict=True)
    ]
    trace = [done for of_row in traces for done in of_row]
    return Generation(
        [stopping.text(new) for new in tokens],
        tokens,
        trace,
        summarise(trace, sum(part.prefill_passes for part in parts), seconds),
        parts,
        [row.ended or row.at_end for row in rows],
    )


def _new_tokens(prompt: int, context: int, longest: int | None, least: int) -> int:
    """How many new tokens a prompt of so many may have."""
    if longest is None and context >= 1 << 30:
        raise SpecdecError("the target names no context length: give max_new_tokens")
    if longest is None and prompt < context:
        longest = context - prompt
    if longest is None or prompt + longest > context:
        wanted = f" and {longest} new ones" if longest else ""
        raise SpecdecError(
            f"a prompt of {prompt} tokens{wanted} exceed the target's context of {context}: "
            "shorten the prompt, lower max_new_tokens, or give None to go on to the context's end"
        )
    if least > longest:
        raise SpecdecError(f"min_new_tokens ({least}) exceeds the {longest} new tokens that are allowed")
    return longest


def as_list(prompts: Any) -> list:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, torch.Tensor):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (list, tuple)) and prompts:
        if isinstance(prompts[0], (int, dict)):
            return [list(prompts)]
        return list(prompts)
    raise SpecdecError("no prompt: give a text, chat messages, token ids, or a list of them")
