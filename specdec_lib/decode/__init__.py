"""Decoding: speculative, several tokens a target pass, and plain, one token a pass.  The loop is in `decode.loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from time import perf_counter
from typing import Any

from .. import validate
from ..drafters import Drafter, as_drafter
from ..errors import SpecdecError
from ..generation_settings import bound, span_of, warn_of_settings
from ..models.pair import Pair, end_tokens, is_encoder_decoder, start_marker, vocabulary_size
from ..models.seq2seq import DecoderView, start_token
from ..models.session import device_of
from ..models.support import check_decoder, check_rows, decoding, new_tokens
from ..processing import NoEndBefore, Processor
from ..prompts import as_list, encode_all
from ..verify import VERIFIERS, Verifier, get_verifier
from .draft_length import Constant, DraftLengthPolicy, as_policy, check_gamma
from .loop import Plan, Text, decode_texts
from .options import DecodeOptions
from .results import Generation, Round, Stats, summarise
from .stopping import Stopping, TextStream

__all__ = [
    "DecodeOptions",
    "Generation",
    "Round",
    "Stats",
    "as_list",
    "check_lengths",
    "generate",
    "generate_plain",
    "summarise",
]


@DecodeOptions.shown
def generate(
    pair: Pair,
    prompts: Any,
    gamma: int | DraftLengthPolicy = 5,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    verifier: str | Verifier = "token",
    seed: int = 0,
    eos: Sequence[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
    *,
    drafts: int = 1,
    **options: Any,
) -> Generation:
    """Decode speculatively: the draft proposes up to `gamma` tokens a round, the target verifies them in one pass.

    Args:
        pair: target, draft, tokenizer.
        prompts: a text, a list of texts, chat messages, a list of those, ids (a list or an array), or a tensor of ids.
        gamma: draft length, >= 1, or a policy of `decode.draft_length` that adapts it.  The last rounds draft no
            more than can be used.
        max_new_tokens, temperature, top_k, top_p, min_p, seed, eos, on_round: see `DecodeOptions`.
        verifier: a name in `specdec_lib.verify.VERIFIERS`, or a `Verifier`.
        drafts: how many drafts of the same length are drawn independently in each round and checked in one pass; see
            `decode.verification.verify_several`.  Above temperature 0, under the token rule, one prompt at a time.
        options: `min_new_tokens`, `stop`, `criteria`, `processors`, `logprobs`, `on_text`, `batch_size`: see
            `DecodeOptions`.

    Returns:
        `Generation`: `texts`, `tokens`, `trace`, `stats`.

    Raises:
        SpecdecError: before any decoding, for input that cannot be used; during decoding, for a drafter that breaks its
            contract, logits that are not finite, and processors that leave no token.

    The model's own generation settings are not applied.  Those that shape the distribution, such as a repetition
    penalty, are named in one warning: `processors=sd.processors_of(pair)` applies them, `processors=[]` silences it.
    Its temperature, truncations and beams are never applied.
    """
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
    given |= {"top_p": top_p, "min_p": min_p, "seed": seed, "eos": eos, "on_round": on_round}
    asked = DecodeOptions.of("generate", given | options)
    if pair.draft is None:
        raise SpecdecError("this pair has no draft: set Pair(draft=...), or call generate_plain")
    drafter, policy, rule = as_drafter(pair.draft), as_policy(gamma), get_verifier(verifier)
    if not asked.params.greedy and (rule.point_mass or rule.greedy_from_target_probs):
        raise SpecdecError(
            f"the {rule.name} verifier is a rule for temperature 0: set temperature=0, or use verifier='token'"
        )
    drafts = validate.whole("drafts", drafts, 1)
    if drafts > 1:
        check_several(drafter, asked, rule)
    if asked.batch_size > 1 and drafter.one_text:
        raise SpecdecError(f"{type(drafter).__name__} drafts for one text at a time: leave out batch_size")
    if rule == VERIFIERS["token"] and asked.params.greedy:
        rule = VERIFIERS["greedy"]  # the same rule at temperature 0, without computing probabilities
    if policy.confidence:
        drafter = drafter.with_confidence(policy.confidence)
    if rule.needs_bonus_draft_probs and drafter.confidence:
        # the rule uses the distribution after the draft, so a token drawn from it must not decide where the draft ends
        raise SpecdecError(f"{rule.name} needs drafts whose length does not depend on their tokens: use no confidence")
    return run(pair, prompts, asked, rule, drafter, policy, drafts)


@DecodeOptions.shown
def generate_plain(
    pair: Pair,
    prompts: Any,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos: Sequence[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
    **options: Any,
) -> Generation:
    """Decode one token a target pass: the baseline of the same target.  Arguments as in `generate`."""
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
    given |= {"top_p": top_p, "min_p": min_p, "seed": seed, "eos": eos, "on_round": on_round}
    asked = DecodeOptions.of("generate_plain", given | options)
    return run(pair, prompts, asked, VERIFIERS["greedy" if asked.params.greedy else "token"])


def check_lengths(gamma: int, max_new_tokens: int) -> None:
    """Refuse a draft length below 1 and a negative number of tokens."""
    check_gamma(gamma)
    validate.whole("max_new_tokens", max_new_tokens)


def check_several(drafter: Drafter, asked: DecodeOptions, rule: Verifier) -> None:
    """Refuse what several drafts cannot be combined with."""
    name = type(drafter).__name__
    if asked.params.greedy:
        raise SpecdecError("at temperature 0 all drafts are equal: leave out drafts, or set temperature above 0")
    if rule != VERIFIERS["token"]:
        raise SpecdecError(
            f"several drafts are verified by a rule of their own, not by {rule.name!r}: leave out verifier or drafts"
        )
    if asked.batch_size != 1:
        raise SpecdecError("several drafts of one text are a batch already: leave out batch_size or drafts")
    if drafter.one_text:
        raise SpecdecError(f"{name} drafts in the target's own session, one chain at a time: leave out drafts")
    if drafter.certain:
        raise SpecdecError(f"{name} is deterministic, so all its drafts are equal: leave out drafts")


def run(
    pair: Pair,
    prompts: Any,
    asked: DecodeOptions,
    rule: Verifier,
    drafter: Drafter | None = None,
    policy: DraftLengthPolicy | None = None,
    drafts: int = 1,
) -> Generation:
    """Decode with arguments that `generate` or `generate_plain` has checked; plainly if there is no drafter."""
    if asked.on_text is not None and pair.tokenizer is None:
        raise SpecdecError("on_text needs a tokenizer: set Pair(tokenizer=...), or use on_round")
    models = [pair.target, *(drafter.models if drafter is not None else [])]
    for model in models:
        (check_rows if asked.batch_size > 1 or drafts > 1 else check_decoder)(model)
    ends, stopping = requested(pair, asked)
    params = asked.params
    warn_of_settings(pair, asked.processors)
    texts = []
    for index, ids in enumerate(encode_all(pair, prompts)):
        length = new_tokens(pair.target, ids, asked.max_new_tokens, asked.min_new_tokens)
        how = replace(params, processors=own_processors(pair, asked, ids, length, ends))
        at_end = "context" if asked.max_new_tokens is None else "length"
        texts.append(
            Text(index, list(ids), len(ids), length, how, Random(f"{asked.seed}/{index}"), stopping.begin(ids), at_end)
        )

    start = perf_counter()
    lengths = (policy or Constant(1)).start()
    plan = Plan(pair.target, drafter, lengths, rule, asked.logprobs, drafts)
    streams = [TextStream(stopping) for _ in texts]
    traces: list[list[Round]] = [[] for _ in texts]
    with decoding(*models):
        for i in range(0, len(texts), asked.batch_size):
            for done in decode_texts(plan, texts[i : i + asked.batch_size]):
                traces[done.row].append(done)
                if asked.on_round is not None:
                    asked.on_round(done)
                if asked.on_text is not None:
                    piece = streams[done.row].piece(done.emitted, bool(texts[done.row].ended))
                    if piece:
                        asked.on_text(done.row, piece)
    return result(texts, traces, stopping, perf_counter() - start)


def requested(pair: Pair, asked: DecodeOptions) -> tuple[tuple[int, ...], Stopping]:
    """For this pair, the ids that end a text, and all rules that end it."""
    vocabulary = vocabulary_size(pair.target)
    ends = tuple(end_tokens(pair)) if asked.eos is None else tuple(asked.eos)
    if asked.eos is not None and (bad := [e for e in ends if e >= vocabulary]):
        raise SpecdecError(f"eos must be ids below the vocabulary's {vocabulary}, got {bad[0]!r}: give [] for none")
    stopping = Stopping.of(pair.tokenizer, ends, asked.stop, asked.criteria, device_of(pair.target))
    stopping = replace(stopping, criteria=as_shown(pair.target, stopping.criteria))
    return ends, stopping


def own_processors(
    pair: Pair, asked: DecodeOptions, ids: list[int], length: int, ends: tuple[int, ...]
) -> tuple[Processor, ...]:
    """The processors of one text: no end token before `min_new_tokens`, then the processors of the call."""
    first = (NoEndBefore(len(ids) + asked.min_new_tokens, ends),) if asked.min_new_tokens and ends else ()
    return *first, *as_shown(pair.target, bound(asked.params.processors, span_of(pair, ids, length, ends)))


def as_shown(target: Any, functions: Sequence[Any]) -> tuple[Any, ...]:
    """Processors or criteria; an encoder-decoder's see only the start token and the output, as in transformers."""
    if not is_encoder_decoder(target):
        return tuple(functions)
    view = partial(DecoderView, marker=start_marker(target), start=start_token(target))
    return tuple(map(view, functions))


def result(texts: list[Text], traces: list[list[Round]], stopping: Stopping, seconds: float) -> Generation:
    """The `Generation` of finished texts."""
    tokens = [text.new for text in texts]
    parts = [
        summarise(trace, int(text.start > 1 and bool(trace)), text.read_seconds + sum(r.seconds for r in trace))
        for text, trace in zip(texts, traces, strict=True)
    ]
    trace = [done for of_row in traces for done in of_row]
    return Generation(
        [stopping.text(new) for new in tokens],
        tokens,
        trace,
        summarise(trace, sum(part.prefill_passes for part in parts), seconds),
        parts,
        [text.ended or text.at_end for text in texts],
    )
