"""A growing text in another tokenizer's tokens is what the whole text gives, and only its end is read again."""

from itertools import groupby, product
from random import Random

import pytest
from test_detokenize import TOKENIZERS
from test_other_tokenizer import every_byte, merged, pieces

from specdec_lib.detokenize import UNFINISHED
from specdec_lib.drafters import other_tokenizer
from specdec_lib.drafters.other_tokenizer import Bridge, contents, decode, encode

TEXT = "the cab, a bee; it isn't the cab! né — 🔥你, (a.b) \n\n  the  ab a\tca_b 12 e.g. 1,5 "
KINDS = {name: make for name, make in TOKENIZERS.items() if not name.startswith(("tidy", "bytes that"))}


def whole(bridge, prefix):
    """Each stretch of text between special tokens decoded and encoded at once."""
    own, text = [], ""
    for special, group in groupby(prefix, key=bridge.target_special.__contains__):
        text = "" if special else decode(bridge.target, tokens := list(group))
        if special:
            own += [bridge.specials[token] for token in group if token in bridge.specials]
        elif tokens:
            own += encode(bridge.draft, text.rstrip(UNFINISHED))
    if own[: len(bridge.opening)] != bridge.opening:
        own = bridge.opening + own
    return own, not text.endswith(UNFINISHED)


@pytest.mark.parametrize(("target", "draft"), product(KINDS, KINDS))
def test_a_text_read_as_it_grows_is_the_whole_text_read_at_once(target, draft):
    target, draft = KINDS[target](), KINDS[draft]()
    bridge, random = Bridge(target, draft), Random(0)
    ids = sorted(target.get_vocab().values())
    text = encode(target, TEXT)
    specials = sorted(bridge.target_special)
    for prefix in (text * 2, [*text[:40], *specials, *text[40:]] * 2, random.choices(ids, k=150)):
        reading, n = bridge.begin(), 0
        while n < len(prefix):
            n += random.randint(1, 6)
            assert reading.extend(prefix[:n]) == whole(bridge, prefix[:n])


@pytest.mark.parametrize(("target", "draft"), [(every_byte, merged), (merged, pieces), (pieces, every_byte)])
def test_each_round_reads_a_few_tokens(target, draft, monkeypatch):
    target, draft = target(), draft()
    bridge, spent = Bridge(target, draft), {"decoded": 0, "encoded": 0, "longest": 0}

    def counted_decode(tokenizer, tokens):
        spent["decoded"] += len(tokens)
        return decode(tokenizer, tokens)

    def counted_encode(tokenizer, text):
        spent["encoded"] += len(text)
        spent["longest"] = max(spent["longest"], len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(other_tokenizer, "decode", counted_decode)
    monkeypatch.setattr(other_tokenizer, "encode", counted_encode)
    text = encode(target, "the cab, a bee. It is not the end of a cab\n" * 200)
    counts = []
    for length in (2000, 4000):
        spent.update(decoded=0, encoded=0, longest=0)
        reading = bridge.begin()
        for n in range(4, length + 1, 4):
            reading.extend(text[:n])
        counts.append(dict(spent))
        assert spent["decoded"] < 4 * length and spent["longest"] < 100
    assert all(counts[1][name] < 2.1 * counts[0][name] for name in ("decoded", "encoded"))


def test_another_text_is_read_from_its_beginning():
    target, draft = every_byte(), merged()
    bridge = Bridge(target, draft)
    reading = bridge.begin()
    for text in ("the cab, a bee", "the cab", "a bee, the cab and more", "a bee, the cab and more"):
        assert reading.extend(encode(target, text)) == whole(bridge, encode(target, text))


def test_contents_are_read_in_one_call():
    tokenizer, calls = merged(), []
    expected = contents(merged())

    def count(name, known):
        setattr(tokenizer, name, lambda *args, **how: (calls.append(name), known(*args, **how))[1])

    count("decode", tokenizer.decode)
    count("batch_decode", tokenizer.batch_decode)
    assert contents(tokenizer) == expected
    assert calls.count("batch_decode") == 1 and len(calls) < 15 < len(expected)
