"""A synthetic translation task: a toy English and a toy German, both made by one small grammar.

It stands in for WMT En-De where nothing can be downloaded, and claims nothing about real translation.  What it keeps
of the real task is what decides how well a small model follows a large one: words move over long distances (the verb
to the end of a clause, a split verb's particle to the end of the main clause, units before tens), endings depend on
gender and case of a word further on, and most sentences have several right translations.  The last point gives the
law of the output its spread: a translation is drawn, and each choice goes one way with probability 0.7.

    "today the old woman opens a red window because the dog wants to buy twenty one apples ."
    "heute macht die alte Frau ein rotes Fenster auf , weil der Hund ein und zwanzig Äpfel kaufen will ."
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

PREFERRED = 0.7  # probability of the first of two alternatives
HELD_OUT = 20  # one sentence in so many is kept for measurements, by a hash of its English

# English singular, plural: German (gender, singular, plural), with an alternative where there is one
PERSONS = {
    "man men": "m Mann Männer, m Kerl Kerle",
    "woman women": "f Frau Frauen, f Dame Damen",
    "child children": "n Kind Kinder",
    "teacher teachers": "m Lehrer Lehrer, f Lehrerin Lehrerinnen",
    "doctor doctors": "m Arzt Ärzte, f Ärztin Ärztinnen",
    "dog dogs": "m Hund Hunde",
    "cat cats": "f Katze Katzen",
    "horse horses": "n Pferd Pferde, n Ross Rosse",
    "painter painters": "m Maler Maler",
    "girl girls": "n Mädchen Mädchen",
}
THINGS = {
    "house houses": "n Haus Häuser, n Gebäude Gebäude",
    "book books": "n Buch Bücher, m Band Bände",
    "apple apples": "m Apfel Äpfel",
    "letter letters": "m Brief Briefe, n Schreiben Schreiben",
    "table tables": "m Tisch Tische",
    "lamp lamps": "f Lampe Lampen, f Leuchte Leuchten",
    "flower flowers": "f Blume Blumen, f Blüte Blüten",
    "bridge bridges": "f Brücke Brücken",
    "window windows": "n Fenster Fenster",
    "key keys": "m Schlüssel Schlüssel",
    "picture pictures": "n Bild Bilder, n Gemälde Gemälde",
    "car cars": "n Auto Autos, m Wagen Wagen",
    "garden gardens": "m Garten Gärten",
    "bag bags": "f Tasche Taschen, m Beutel Beutel",
    "boat boats": "n Boot Boote, m Kahn Kähne",
    "box boxes": "f Kiste Kisten, m Kasten Kästen",
}
ADJECTIVES = {
    "old": "alt", "young": "jung", "small": "klein", "big": "groß", "red": "rot", "green": "grün", "new": "neu",
    "beautiful": "schön", "cheap": "billig", "heavy": "schwer", "quiet": "still", "strange": "seltsam",
}  # fmt: skip
# English present, participle, infinitive: German present (with its particle), participle, infinitive
VERBS = {
    "sees seen see": "sieht gesehen sehen, erblickt erblickt erblicken",
    "buys bought buy": "kauft gekauft kaufen, erwirbt erworben erwerben",
    "finds found find": "findet gefunden finden",
    "paints painted paint": "malt gemalt malen",
    "carries carried carry": "trägt getragen tragen",
    "sells sold sell": "verkauft verkauft verkaufen",
    "opens opened open": "macht+auf aufgemacht aufmachen, öffnet geöffnet öffnen",
    "closes closed close": "macht+zu zugemacht zumachen, schließt geschlossen schließen",
    "collects collected collect": "holt+ab abgeholt abholen",
    "repairs repaired repair": "repariert repariert reparieren, bessert+aus ausgebessert ausbessern",
}
MODALS = {"wants to": "will", "can": "kann", "must": "muss"}
TIMES = {"today": "heute", "often": "oft, häufig", "tomorrow": "morgen", "never": "nie, niemals"}
PLACES = {"with": "mit", "in": "in", "near": "bei", "behind": "hinter"}  # all four take the dative here
LINKS = {"and": "und", "because": "weil, da", "while": "während", "although": "obwohl, obgleich"}
UNITS = {
    "one": "ein", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "seven": "sieben",
    "eight": "acht", "nine": "neun", "ten": "zehn", "eleven": "elf", "twelve": "zwölf", "thirteen": "dreizehn",
    "fourteen": "vierzehn", "fifteen": "fünfzehn", "sixteen": "sechzehn", "seventeen": "siebzehn",
    "eighteen": "achtzehn", "nineteen": "neunzehn",
}  # fmt: skip
TENS = {
    "twenty": "zwanzig", "thirty": "dreißig", "forty": "vierzig", "fifty": "fünfzig", "sixty": "sechzig",
    "seventy": "siebzig", "eighty": "achtzig", "ninety": "neunzig",
}  # fmt: skip
ARTICLES = {  # for m, f, n
    ("the", "nominative"): "der die das",
    ("the", "accusative"): "den die das",
    ("the", "dative"): "dem der dem",
    ("a", "nominative"): "ein eine ein",
    ("a", "accusative"): "einen eine ein",
    ("a", "dative"): "einem einer einem",
}
ENDINGS = {
    ("the", "nominative"): "e e e",
    ("the", "accusative"): "en e e",
    ("the", "dative"): "en en en",
    ("a", "nominative"): "er e es",
    ("a", "accusative"): "en e es",
    ("a", "dative"): "en en en",
}

NOUNS = PERSONS | THINGS
_UNITS, _TENS = list(UNITS), list(TENS)


@dataclass(frozen=True)
class Noun:
    """`article adjective noun`, or `count adjective nouns` where `count` is not 0."""

    noun: str
    article: str
    adjective: str
    count: int = 0


@dataclass(frozen=True)
class Clause:
    """Who does what; `modal` is empty, "has" or a modal verb; `time` and `place` may be empty."""

    subject: Noun
    modal: str
    verb: str
    thing: Noun
    place: tuple[str, Noun] | None
    time: str
    time_first: bool


@dataclass(frozen=True)
class Sentence:
    """A main clause and what follows it, each with its link."""

    clauses: tuple[Clause, ...]
    links: tuple[str, ...]

    @property
    def english(self) -> str:
        parts = [english_clause(self.clauses[0])]
        parts += [f"{link} {english_clause(c)}" for link, c in zip(self.links, self.clauses[1:], strict=True)]
        return " ".join([*parts, "."])

    @property
    def pieces(self) -> list[Callable[[Any], list[str]]]:
        """The parts of a translation, each worded independently of the others by `piece(rng)`."""
        found: list[Callable[[Any], list[str]]] = [partial(main_clause, self.clauses[0])]
        for link, clause in zip(self.links, self.clauses[1:], strict=True):
            order = main_clause if link == "and" else subordinate_clause
            found += [partial(german_link, link), partial(order, clause)]
        return found

    def german(self, rng: Any) -> str:
        """One translation, drawn with `rng.random()`."""
        return " ".join([word for piece in self.pieces for word in piece(rng)] + ["."])

    def is_translation(self, text: str) -> bool:
        """Whether the grammar can write `text` for this sentence."""
        from ..audit.enumeration import runs

        wordings = ["|".join(re.escape(" ".join(words)) for _, words in runs(piece)) for piece in self.pieces]
        return re.fullmatch(" ".join(f"(?:{w})" for w in wordings) + r" \.", text) is not None


def pick(alternatives: str, rng: Any) -> str:
    """One of one or two alternatives, the first with probability `PREFERRED`."""
    first, *second = alternatives.split(", ")
    return second[0] if second and not rng.random() < PREFERRED else first


# -- English -------------------------------------------------------------------------------------------


def english_number(n: int) -> list[str]:
    """
    >>> " ".join(english_number(342)), " ".join(english_number(12))
    ('three hundred forty two', 'twelve')
    """
    hundreds, rest = divmod(n, 100)
    words = [_UNITS[hundreds - 1], "hundred"] if hundreds else []
    if rest > 19:
        tens, rest = divmod(rest, 10)
        words.append(_TENS[tens - 2])
    return words + ([_UNITS[rest - 1]] if rest else [])


def english_noun(noun: Noun) -> str:
    singular, plural = noun.noun.split()
    words = [noun.adjective] * bool(noun.adjective) + [plural if noun.count else singular]
    article = "an" if noun.article == "a" and words[0][0] in "aeiou" else noun.article
    return " ".join([*(english_number(noun.count) if noun.count else [article]), *words])


def english_clause(clause: Clause) -> str:
    present, participle, infinitive = clause.verb.split()
    verb = {"": present, "has": f"has {participle}"}.get(clause.modal, f"{clause.modal} {infinitive}")
    words = [english_noun(clause.subject), verb, english_noun(clause.thing)]
    if clause.place:
        words += [clause.place[0], english_noun(clause.place[1])]
    if clause.time:
        words.insert(0 if clause.time_first else len(words), clause.time)
    return " ".join(words)


# -- German --------------------------------------------------------------------------------------------


def german_number(n: int) -> list[str]:
    """
    >>> " ".join(german_number(342)), " ".join(german_number(12))
    ('drei hundert zwei und vierzig', 'zwölf')
    """
    hundreds, rest = divmod(n, 100)
    words = [UNITS[_UNITS[hundreds - 1]], "hundert"] if hundreds else []
    if rest > 19:
        tens, rest = divmod(rest, 10)
        ten = TENS[_TENS[tens - 2]]
        return [*words, UNITS[_UNITS[rest - 1]], "und", ten] if rest else [*words, ten]
    return words + ([UNITS[_UNITS[rest - 1]]] if rest else [])


def german_noun(noun: Noun, case: str, rng: Any) -> list[str]:
    """
    >>> " ".join(german_noun(Noun("cat cats", "a", "old"), "dative", None))
    'einer alten Katze'
    """
    gender, singular, plural = pick(NOUNS[noun.noun], rng).split()
    adjective = ADJECTIVES.get(noun.adjective)
    if noun.count:
        return [*german_number(noun.count), *([adjective + "e"] if adjective else []), plural]
    article, ending = (table[noun.article, case].split()["mfn".index(gender)] for table in (ARTICLES, ENDINGS))
    return [article, *([adjective + ending] if adjective else []), singular]


def german_link(link: str, rng: Any) -> list[str]:
    return ["und"] if link == "and" else [",", pick(LINKS[link], rng)]


def german_verb(clause: Clause, rng: Any) -> tuple[str, str, str]:
    """The finite verb, the particle split off it, and the part at the end; empty where there is none."""
    present, participle, infinitive = pick(VERBS[clause.verb], rng).split()
    finite, _, particle = present.partition("+")
    if clause.modal == "has":
        return "hat", "", participle
    return (MODALS[clause.modal], "", infinitive) if clause.modal else (finite, particle, "")


def middle(clause: Clause, rng: Any) -> list[str]:
    """Object and place, in either order."""
    thing = german_noun(clause.thing, "accusative", rng)
    if not clause.place:
        return thing
    place = [PLACES[clause.place[0]], *german_noun(clause.place[1], "dative", rng)]
    return thing + place if rng.random() < PREFERRED else place + thing


def main_clause(clause: Clause, rng: Any) -> list[str]:
    """The finite verb comes second, after the time or the subject; the rest of the verb comes last."""
    finite, particle, end = german_verb(clause, rng)
    subject = german_noun(clause.subject, "nominative", rng)
    if not clause.time:
        start = [*subject, finite]
    else:
        time = pick(TIMES[clause.time], rng)
        start = [time, finite, *subject] if rng.random() < PREFERRED else [*subject, finite, time]
    return [*start, *middle(clause, rng), *filter(None, [end or particle])]


def subordinate_clause(clause: Clause, rng: Any) -> list[str]:
    """The finite verb comes last, after the rest of the verb, and keeps its particle."""
    finite, particle, end = german_verb(clause, rng)
    time = [pick(TIMES[clause.time], rng)] if clause.time else []
    subject = german_noun(clause.subject, "nominative", rng)
    return [*subject, *time, *middle(clause, rng), *filter(None, [end, particle + finite])]


# -- sentences -----------------------------------------------------------------------------------------


def _one_of(options: Any, rng: np.random.Generator) -> Any:
    options = list(options)
    return options[int(rng.integers(len(options)))]


def _noun(nouns: dict[str, str], rng: np.random.Generator, counted: float = 0.0) -> Noun:
    adjective = _one_of(ADJECTIVES, rng) if rng.random() < 0.4 else ""
    number = int(rng.integers(2, 1000)) if rng.random() < counted else 0
    if number % 100 == 1:
        number += 1  # "one" would need the singular
    return Noun(_one_of(nouns, rng), "the" if rng.random() < 0.6 else "a", adjective, number)


def _clause(rng: np.random.Generator) -> Clause:
    return Clause(
        subject=_noun(PERSONS, rng),
        modal=_one_of(["", "has", _one_of(MODALS, rng)], rng),
        verb=_one_of(VERBS, rng),
        thing=_noun(THINGS, rng, counted=0.3),
        place=(_one_of(PLACES, rng), _noun(NOUNS, rng)) if rng.random() < 0.3 else None,
        time=_one_of(TIMES, rng) if rng.random() < 0.4 else "",
        time_first=bool(rng.random() < 0.5),
    )


def random_sentence(rng: np.random.Generator) -> Sentence:
    """One clause or, more often, two."""
    clauses = tuple(_clause(rng) for _ in range(1 + int(rng.random() < 0.6)))
    return Sentence(clauses, tuple(_one_of(LINKS, rng) for _ in clauses[1:]))


def sentences(seed: Any, held_out: bool = False) -> Iterator[Sentence]:
    """An endless stream of sentences; those held out for measurements and those for training are disjoint."""
    rng = np.random.default_rng(seed)
    while True:
        sentence = random_sentence(rng)
        if (zlib.crc32(sentence.english.encode()) % HELD_OUT == 0) == held_out:
            yield sentence


def vocabulary() -> list[str]:
    """All words of both languages, sorted, without repeats."""
    english = [" ".join(d) for d in (NOUNS, ADJECTIVES, VERBS, MODALS, TIMES, PLACES, LINKS, UNITS, TENS)]
    german = [" ".join(d.values()).replace("+", " ").replace(",", "") for d in (NOUNS, TIMES, PLACES, LINKS)]
    german += [" ".join(d.values()) for d in (MODALS, UNITS, TENS, ARTICLES)]
    for forms in " ".join(VERBS.values()).replace(",", "").split():
        finite, _, particle = forms.partition("+")
        german += [finite, particle, particle + finite]
    german += [a + ending for a in ADJECTIVES.values() for ending in ("e", "en", "er", "es")]
    words = set(" ".join([*english, *german, "the a an has hundred hundert hat , ."]).split())
    return sorted(words - set("mfn"))  # the genders
