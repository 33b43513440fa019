"""Drafts in other tokens: by text, by the tokens that both tokenizers know, and with a padded vocabulary."""

import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from tiny import ALPHABET, SPECIAL, tiny_model, tiny_tokenizer
from transformers import RepetitionPenaltyLogitsProcessor

import specdec_lib as sd
from specdec_lib.decode.draft_length import Confidence
from specdec_lib.drafters import SamplingParams
from specdec_lib.drafters.on_disk import packaged_drafts
from specdec_lib.drafters.other_tokenizer import Bridge, contents, decode, difference, encode
from specdec_lib.load import default_draft
from specdec_lib.models import load_model, load_tokenizer, load_transformers
from specdec_lib.models.pair import fast

sys.path.insert(0, str(Path(__file__).parent / "cases"))
from kit import law_of, slow_greedy, slow_law, slow_scores, total_variation

TEXT = "ab ca, the cab. a bee"


def byte_level(tokens, merges=()):
    """A byte-level tokenizer, as GPT-2's: a space is part of the token that follows it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=tokens[0], unk_token="<unk>", pad_token=tokens[0], bos_token=None
    )


def merged():
    """`tiny_tokenizer`'s letters in another order, with pairs of them as tokens, and another name for the end."""
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("Ġ", "a"), ("c", "a"), ("e", "e")]
    return byte_level(["</s>", "<unk>", *reversed(ALPHABET), *("".join(m) for m in merges)], merges)


def pieces():
    """As Llama 2's: `▁` for a space, one before every text, bytes for what is no letter, and `<s>` first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["▁", *ALPHABET[:-2], "▁a", "he", "the", "▁the", "ab"]
    names = ["<s>", "</s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    merges = [("▁", "a"), ("h", "e"), ("t", "he"), ("▁", "the"), ("a", "b")]
    inner = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def words():
    """Whole words between spaces; what is no known word is lost, so that text does not come back."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[end]", "<unk>", "a", "ab", "the", "cab", "bee", "ca", ",", "."]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[end]", unk_token="<unk>")


def every_byte():
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return byte_level(["<eos>", "<unk>", *letters])


KINDS = {"letters": lambda: tiny_tokenizer("llama"), "merged": merged, "pieces": pieces, "words": words}


def model_for(tokenizer, seed=0, kind="llama", **settings):
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    return fast(tiny_model(kind, tokenizer, seed, ends | settings).double())


def drafter(how, model, tokenizer, target_tokenizer):
    return {"text": sd.TextDrafter, "shared": sd.SharedVocabularyDrafter}[how](model, tokenizer, target_tokenizer)


def propose(drafter, vocabulary, prefix, gamma=4, temperature=0.0):
    return drafter.start(vocabulary).propose(prefix, gamma, SamplingParams(temperature), Random(0))


# -- nothing but the target's text and law --------------------------------------------------------------


def combinations():
    """Letters and whole words have no token in common."""
    for kind, target_kind in product(KINDS, KINDS):
        yield "text", kind, target_kind
        if {kind, target_kind} != {"letters", "words"}:
            yield "shared", kind, target_kind


@pytest.mark.parametrize(("how", "kind", "target_kind"), combinations())
def test_the_greedy_text_is_the_targets(how, kind, target_kind):
    own, other = KINDS[kind](), KINDS[target_kind]()
    target, model = model_for(other, 0), model_for(own, 1)
    pair = sd.Pair(target, drafter(how, model, own, other), other)
    prompts = [other(TEXT)["input_ids"], other("the cab, a bee")["input_ids"]]
    for options in ({}, {"batch_size": 2}, {"gamma": Confidence(0.2, 4)}):
        out = sd.generate(pair, prompts, max_new_tokens=16, eos=[], **options)
        assert out.tokens == [slow_greedy(target, prompt, 16) for prompt in prompts]
    assert out.stats.drafted > 0


PENALTY = {"processors": [RepetitionPenaltyLogitsProcessor(3.0)]}  # it counts the target's tokens, not the draft's


@pytest.mark.parametrize("how", ["text", "shared"])
@pytest.mark.parametrize(
    ("padded", "options"),
    [(0, {}), (2, {"top_k": 2, "temperature": 0.7}), (0, {"verifier": "block", "top_p": 0.9}), (0, PENALTY)],
)
def test_the_law_is_the_targets(how, padded, options):
    """Enumerated: every way that the draws of draft and target can fall."""
    other = byte_level(["<eos>", "<unk>", "a", "b"])
    own = byte_level(["</s>", "b", "c", "a", "<unk>", "ab"], [("a", "b")])
    target, model = model_for(other, 3), model_for(own, 5, vocab_size=len(own) + padded)
    pair = sd.Pair(target, drafter(how, model, own, other), other)
    settings = {"gamma": 2, "max_new_tokens": 3, "temperature": 1.0, "eos": []} | options
    prompt = [2, 3, 3, 2]
    rounds = []
    found = law_of(lambda: tuple(sd.generate(pair, prompt, on_round=rounds.append, **settings).tokens[0]))
    asked = {k: v for k, v in settings.items() if k in ("temperature", "top_k", "top_p")}
    expected = slow_law(target, prompt, 3, SamplingParams(**asked), processors=options.get("processors", ()))
    assert total_variation(found, expected) < 1e-12 and len(expected) > 3
    assert any(r.accepted for r in rounds) and any(len(r.drafted) > r.accepted for r in rounds)


def test_a_law_that_was_not_drawn_from_is_found_out():
    """Weights that sum to a half, as of probabilities that were restricted but not renormalised, are refused."""
    other, own = byte_level(["<eos>", "<unk>", "a", "b"]), byte_level(["</s>", "b", "c", "a", "<unk>"])
    target, model = model_for(other, 3), model_for(own, 5)
    honest = sd.SharedVocabularyDrafter(model, own, other)

    class Wrong(sd.Drafter):
        def start(self, vocabulary):
            session = honest.start(vocabulary)
            propose = session.propose

            def half(*given):
                draft = propose(*given)
                draft.probs = draft.probs / 2
                return draft

            session.propose = half
            return session

    options = {"gamma": 1, "max_new_tokens": 2, "temperature": 1.0, "eos": []}
    with pytest.raises(sd.SpecdecError, match=r"Wrong reports probabilities that sum to 0\.5, not 1"):
        sd.generate(sd.Pair(target, Wrong()), [2, 3], **options)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_reported_law_is_the_restricted_one(temperature):
    """q = d on the shared tokens over their sum: recomputed from the draft's own full law, token by token."""
    other, own = tiny_tokenizer("llama"), merged()
    model = model_for(own, 1)
    drafting = sd.SharedVocabularyDrafter(model, own, other)
    prefix = encode(other, TEXT)
    draft = propose(drafting, len(other), prefix, temperature=temperature)
    read = encode(own, TEXT)
    assert len(draft.tokens) == 4 and draft.passes == 4
    for token, law in zip(draft.tokens, draft.probs, strict=True):
        full = (slow_scores(model, read, 0) / temperature).softmax(-1)
        texts = {decode(own, [i]): p for i, p in enumerate(full.tolist()) if len(decode(own, [i])) == 1}
        expected = torch.tensor([texts.get(decode(other, [i]), 0.0) for i in range(len(other))], dtype=torch.double)
        expected[other.eos_token_id] = full[own.eos_token_id]
        expected[other.unk_token_id] = full[own.unk_token_id]
        torch.testing.assert_close(law, expected / expected.sum(), rtol=1e-9, atol=1e-12)
        read = [*read, own.convert_tokens_to_ids(other.convert_ids_to_tokens(token))]


# -- by text ---------------------------------------------------------------------------------------------


def table(tokenizer, text):
    return sd.NGramDrafter.fit([encode(tokenizer, text)], order=4)


@pytest.mark.parametrize("target_kind", ["letters", "merged", "pieces"])
@pytest.mark.parametrize("kind", ["letters", "merged", "pieces"])
def test_the_text_of_a_draft_arrives_in_the_targets_tokens(kind, target_kind):
    own, other = KINDS[kind](), KINDS[target_kind]()
    drafting = sd.TextDrafter(table(own, "xy the cab, the cab, the cab, the cab"), own, other)
    prefix = other("the cab, the c")["input_ids"]
    draft = propose(drafting, len(other), prefix, gamma=6)
    assert decode(other, prefix + draft.tokens).startswith(decode(other, prefix) + "ab, ")
    assert draft.probs is None and len(draft.tokens) <= 6


def test_a_draft_of_the_targets_own_text_is_kept_whole():
    """A model whose text is the target's, in other tokens, is never refused: here a table of that very text."""
    other, own = tiny_tokenizer("llama"), merged()
    target = model_for(other)
    prompt = encode(other, TEXT)
    written = slow_greedy(target, prompt, 60)
    start = next(i for i in range(60) if not set(written[i:]) & set(other.all_special_ids))
    known = TEXT + decode(other, written)

    class Reader(sd.Drafter):
        """Goes on with the known text, in tokens of its own."""

        def start(self, vocabulary):
            return self

        def propose(self, prefix, gamma, sampling, random):
            text = decode(own, prefix)
            assert known.startswith(text)
            return sd.drafters.Draft(encode(own, known[len(text) :])[:gamma], certain=True)

    pair = sd.Pair(target, sd.TextDrafter(Reader(), own, other), other)
    out = sd.generate(pair, prompt + written[:start], max_new_tokens=20 if start < 40 else 60 - start, eos=[])
    assert out.stats.drafted > 0 and out.stats.acceptance_rate == 1


def test_half_a_character_is_never_proposed():
    other, own = every_byte(), every_byte()
    drafting = sd.TextDrafter(table(own, "né né né né "), own, other)
    bytes_of = encode(other, "né ")
    assert len(bytes_of) == 4
    prefix = encode(other, "né né n")
    assert propose(drafting, len(other), prefix, gamma=1).tokens == []  # one byte of two
    assert propose(drafting, len(other), prefix, gamma=2).tokens == bytes_of[1:3]
    # the target stands in the middle of a character: its other half is what is proposed
    assert propose(drafting, len(other), prefix + bytes_of[1:2], gamma=2).tokens == bytes_of[2:3]


def test_a_shared_draft_waits_for_the_end_of_a_character():
    other, own = every_byte(), merged()
    drafting = sd.SharedVocabularyDrafter(model_for(own), own, other)
    prefix = encode(other, "ab é")
    assert propose(drafting, len(other), prefix[:-1]).tokens == []
    assert len(propose(drafting, len(other), prefix).tokens) == 4


def test_the_end_of_a_text_has_another_name():
    other, own = tiny_tokenizer("llama"), merged()
    ends = sd.NGramDrafter.fit([[*encode(own, "the cab"), own.eos_token_id]], order=4)
    draft = propose(sd.TextDrafter(ends, own, other), len(other), encode(other, "the c"), gamma=8)
    assert draft.tokens == [*encode(other, "ab"), other.eos_token_id]


def test_special_tokens_are_translated_or_left_out():
    other, own = tiny_tokenizer("gemma"), merged()
    chat = other.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False, add_generation_prompt=True)
    ids = [other.bos_token_id, *encode(other, chat)]
    tokens, whole = Bridge(other, own).draft_tokens(ids)
    assert whole and tokens == [*encode(own, "user ab"), own.eos_token_id, *encode(own, "assistant ")]
    back, _ = Bridge(own, pieces()).draft_tokens(encode(own, "ab"))
    assert back == pieces()("ab")["input_ids"]  # <s> comes first where the draft's tokenizer has it so


def test_the_drafts_cache_goes_back_to_the_longest_common_prefix():
    other, own = tiny_tokenizer("llama"), merged()
    drafting = sd.TextDrafter(model_for(own), own, other)
    session = drafting.start(len(other))
    fed = []
    reader = session.batch.batch.session
    feed = reader.feed
    reader.feed = lambda ids, last=1: (fed.append(ids.shape[1]), feed(ids, last))[1]
    text = "a bee, the cab and t"
    session.propose(encode(other, text), 1, SamplingParams(), Random(0))
    session.propose(encode(other, text + "h"), 1, SamplingParams(), Random(0))  # "t" and "h" are one token of the draft
    session.propose(encode(other, text + "he b"), 1, SamplingParams(), Random(0))
    assert fed == [len(encode(own, text)), 1, 3]


def test_a_small_tokenizer_of_ones_own_drafts_for_the_packaged_target(packaged_folder):
    """A chat of a real target: a table of its own answer, in tokens that were made from that answer."""
    from tokenizers import trainers

    pair = sd.load_pair(packaged_folder, "lookup", device="cpu")
    prompt = "Write about a café in Zürich 😀."
    plain = sd.generate_plain(pair, prompt, max_new_tokens=24, eos=[])
    own = every_byte()
    own._tokenizer.train_from_iterator(
        plain.texts, trainers.BpeTrainer(vocab_size=320, special_tokens=["<eos>", "<unk>"], show_progress=False)
    )
    drafting = sd.TextDrafter(table(own, plain.texts[0]), own, pair.tokenizer)
    out = sd.generate(sd.Pair(pair.target, drafting, pair.tokenizer), prompt, max_new_tokens=24, eos=[])
    assert out.tokens == plain.tokens
    assert out.stats.kept > 12


@pytest.mark.parametrize("how", ["text", "shared"])
def test_the_packaged_draft_of_another_tokenizer(how):
    pair = sd.load_pair(draft="own-tokenizer", device="cpu", tokenizers=how)
    prompts = ["Name three fruits.", "What is the capital of France? 12 + 30 = ?"]
    out = sd.generate(pair, prompts, gamma=3, max_new_tokens=16)
    assert out.tokens == sd.generate_plain(pair, prompts, max_new_tokens=16).tokens
    assert 0 < out.stats.kept < out.stats.drafted
    sampled = sd.generate(pair, prompts[0], gamma=3, max_new_tokens=8, temperature=1.0)
    assert sampled.stats.drafted > 0 and not hasattr(pair.draft, "config")


def test_the_packaged_draft_of_another_tokenizer_is_never_taken_unasked():
    with pytest.raises(sd.SpecdecError, match=r"^own-tokenizer has another vocabulary.*tokenizers='text'"):
        sd.load_pair(draft="own-tokenizer", device="cpu")
    assert "own-tokenizer" in packaged_drafts() and "own-tokenizer" not in packaged_drafts("model", "ngram")
    assert "own-tokenizer" not in default_draft("packaged").split("+")
    both = sd.load_pair(draft="lookup+own-tokenizer", device="cpu", tokenizers="shared")
    assert isinstance(both.draft, sd.ComposedDrafter)


# -- padding, and tokenizers that differ in content --------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("target_size", "size"), [(46, 50), (50, 46), (48, 52)])
@pytest.mark.parametrize("how", ["same", "text", "shared"])
def test_a_padded_vocabulary_of_the_same_tokenizer(how, target_size, size, kind, tiny_folder):
    folders = [tiny_folder(kind, seed, vocab_size=n) for seed, n in ((0, target_size), (1, size))]
    pair = sd.load_pair(*folders, device="cpu", dtype="float64", tokenizers=how)
    model = load_transformers(folders[0], "cpu", "float64")
    prompt = [5, 9, 17, 3, 8, 9, 17, 3]
    prompts = [prompt, prompt[3:]]
    for options in ({}, {"batch_size": 2}):
        out = sd.generate(pair, prompts, max_new_tokens=16, eos=[], **options)
        assert out.tokens == [slow_greedy(model, p, 16) for p in prompts]
    sampled = sd.generate(pair, prompts, max_new_tokens=16, eos=[], temperature=1.0)
    assert out.stats.drafted > 0 and sampled.stats.drafted > 0


@pytest.mark.parametrize(("target_size", "size"), [(4, 6), (6, 4)])
def test_the_law_with_a_padded_vocabulary(target_size, size):
    tokenizer = byte_level(["<eos>", "<unk>", "a", "b"])
    target, model = model_for(tokenizer, 3, vocab_size=target_size), model_for(tokenizer, 5, vocab_size=size)
    pair = sd.Pair(target, sd.ModelDrafter(model), tokenizer)
    found = law_of(
        lambda: tuple(sd.generate(pair, [2, 3], gamma=1, max_new_tokens=2, temperature=1.0, eos=[]).tokens[0])
    )
    assert total_variation(found, slow_law(target, [2, 3], 2)) < 1e-12
    assert propose(sd.ModelDrafter(model), target_size, [2, 3], 2, 1.0).probs.shape == (2, target_size)
    # a token that the draft has no row for cannot be read: the target goes on alone
    read = propose(sd.ModelDrafter(model), target_size, [2, target_size - 1])
    assert len(read.tokens) == (0 if size < target_size else 4)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """A model of as many tokens as `tiny_tokenizer`'s, in another order."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = byte_level([*SPECIAL, *reversed(ALPHABET)])
    tokenizer.save_pretrained(folder)
    tiny_model("llama", tokenizer, 1, {}).save_pretrained(folder)
    return folder


def test_as_many_tokens_but_others_are_refused_or_routed(other_folder, tiny_folder):
    target = tiny_folder("llama")
    with pytest.raises(sd.SpecdecError, match=r"token 3 is 'Ċ' .* 'a' in the target's.*'text'.*'shared'"):
        sd.load_pair(target, other_folder, device="cpu")
    expected = sd.generate_plain(sd.load_pair(target, device="cpu"), TEXT, max_new_tokens=16, eos=[]).tokens
    for how, kind in (("text", sd.TextDrafter), ("shared", sd.SharedVocabularyDrafter)):
        pair = sd.load_pair(target, other_folder, device="cpu", tokenizers=how)
        assert isinstance(pair.draft, kind)
        out = sd.generate(pair, TEXT, max_new_tokens=16, eos=[])
        assert out.tokens == expected and out.stats.drafted > 0
    assert pair.draft.shared == len([*ALPHABET, "<eos>", "<unk>"])  # its <bos> is no special token


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f, o: sd.load_pair(f("llama"), "lookup", tokenizers="text"), "not for lookup: leave it out"),
        (lambda f, o: sd.load_pair(f("llama"), o, tokenizers="words"), "unknown tokenizers 'words'"),
        (lambda f, o: sd.load_pair(f("t5"), o, device="cpu", tokenizers="text"), "takes no draft in other tokens"),
        (lambda f, o: sd.load_pair(f("llama"), f("t5"), device="cpu", tokenizers="text"), "cannot draft in other"),
        (lambda f, o: sd.load_pair(f("llama"), f("t5"), device="cpu", tokenizers="shared"), "cannot draft in other"),
        (lambda f, o: sd.TextDrafter(sd.EarlyExitDrafter(1), merged(), merged()), "the target's own tokens"),
        (lambda f, o: sd.TextDrafter(table(merged(), TEXT), merged(), merged()).with_confidence(0.5), "no confidence"),
        (lambda f, o: sd.SharedVocabularyDrafter(model_for(words()), words(), every_byte()), "share no token"),
    ],
)
def test_what_cannot_work_is_refused(make, message, tiny_folder, other_folder):
    with pytest.raises(sd.SpecdecError, match=message):
        make(tiny_folder, other_folder)


def test_contents_are_texts_not_names():
    spaced = {kind: contents(KINDS[kind]()) for kind in KINDS}
    assert " the" in spaced["pieces"] and " the" in spaced["words"] and " a" in spaced["merged"]
    assert spaced["merged"]["ab"] == merged().convert_tokens_to_ids("ab")
    assert "\ufffd" not in "".join(contents(every_byte()))
    assert difference(merged(), merged()) is None
    assert difference(tiny_tokenizer("llama"), tiny_tokenizer("t5")) is None


# -- nothing is modified -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["text", "shared"])
def test_the_draft_model_stays_as_it_was(how, other_folder, tiny_folder):
    """https://github.com/huggingface/transformers/pull/35029 - an output head that was cut for the shared tokens."""
    target, model = load_model(tiny_folder("llama"), "cpu"), load_transformers(other_folder, "cpu")
    own, other = load_tokenizer(other_folder), load_tokenizer(tiny_folder("llama"))
    model.generation_config.repetition_penalty = 1.3

    def state():
        weights = [(name, tuple(p.shape), p.double().sum().item()) for name, p in model.named_parameters()]
        return model.config.to_dict(), model.generation_config.to_dict(), weights, sorted(vars(model)), own.get_vocab()

    def fail(*args):
        raise RuntimeError("in the middle")

    before = state()
    pair = sd.Pair(target, drafter(how, model, own, other), other)
    first = sd.generate(pair, TEXT, temperature=1.0, max_new_tokens=12)
    with pytest.raises(RuntimeError, match="in the middle"):
        sd.generate(pair, TEXT, on_round=fail)
    assert state() == before
    assert sd.generate(pair, TEXT, temperature=1.0, max_new_tokens=12).tokens == first.tokens
    again = drafter(how, load_transformers(other_folder, "cpu"), own, other)  # a second draft of the same tokenizers
    assert sd.generate(sd.Pair(target, again, other), TEXT, temperature=1.0, max_new_tokens=12).tokens == first.tokens


def test_a_draft_whose_context_ends_lets_the_target_go_on():
    other, own = tiny_tokenizer("llama"), merged()
    target, short = model_for(other), model_for(own, 1, "gpt2", n_positions=20)
    prompt = encode(other, TEXT)
    for how in ("text", "shared"):
        out = sd.generate(sd.Pair(target, drafter(how, short, own, other)), prompt, max_new_tokens=30, eos=[])
        assert out.tokens == [slow_greedy(target, prompt, 30)]
        assert out.stats.drafted > 0 and out.trace[-3].drafted == []
