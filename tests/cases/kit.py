"""What the cases compare with: a slow decoder that is obviously right, and the exact law of what ours writes."""

from collections import defaultdict
from unittest.mock import patch

import torch

from specdec_lib.audit.enumeration import runs
from specdec_lib.drafters import SamplingParams
from specdec_lib.models import open_session
from specdec_lib.models.fast import FastLlama
from specdec_lib.models.pair import is_encoder_decoder

NOWHERE = float("-inf")


def begun(model, prompt):
    """What an encoder-decoder reads, None for others, and the ids that the first new token follows."""
    if is_encoder_decoder(model):
        return list(prompt), [model.config.decoder_start_token_id]
    return None, list(prompt)


def slow_scores(model, ids, start, ends=(), min_new=0, processors=(), source=None):
    """Processed logits `[V]` of the token after the text `ids`, which is read anew from its beginning."""
    with torch.no_grad():
        if source is not None:
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits
        elif isinstance(model, FastLlama):
            logits = open_session(model).feed(torch.tensor([ids]))
        else:
            logits = model(torch.tensor([ids])).logits
    scores = logits[:, -1].clone()
    if len(ids) - start < min_new:
        scores[:, list(ends)] = NOWHERE
    for processor in processors:
        scores = processor(torch.tensor([ids]), scores)
    return scores[0]


def slow_greedy(model, prompt, n, ends=(), min_new=0, stop=(), criteria=(), processors=(), decode=None):
    """The most probable token, one at a time, all rules asked after each: what every decoder must write."""
    source, ids = begun(model, prompt)
    start = len(ids)
    while len(ids) - start < n:
        ids.append(int(slow_scores(model, ids, start, ends, min_new, processors, source).argmax()))
        told = [bool(criterion(torch.tensor([ids]), None)) for criterion in criteria]
        if ids[-1] in ends or any(told) or any(s in decode(ids[start:]) for s in stop):
            break
    return ids[start:]


def slow_law(model, prompt, n, sampling=None, ends=(), min_new=0, processors=()):
    """`{tokens: probability}` of sampling one token at a time: the product of the target's laws."""
    sampling, law = sampling or SamplingParams(1.0), {}
    source, first = begun(model, prompt)
    start = len(first)

    def extend(ids, weight):
        if len(ids) - start == n or (len(ids) > start and ids[-1] in ends):
            law[tuple(ids[start:])] = weight
            return
        needs_bonus_draft_probs = sampling.probs(slow_scores(model, ids, start, ends, min_new, processors, source))
        for token, p in enumerate(needs_bonus_draft_probs.tolist()):
            if p > 0:
                extend([*ids, token], weight * p)

    extend(first, 1.0)
    return law


def law_of(write):
    """`{result: probability}` of a decoder that draws: `write()` is run once for every way its draws can fall."""

    def once(generator):
        def choose(probs, random):
            return generator._path.choose([float(p) for p in probs])

        with patch("specdec_lib.sampling.draw", choose):
            return write()

    law = defaultdict(float)
    for weight, result in runs(once):
        law[result] += weight
    return law


def total_variation(a, b):
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2
