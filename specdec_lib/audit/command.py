"""`specdec audit`: does a decoder, or a rule of one's own, keep the target's law?"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecdecError, first_line

if TYPE_CHECKING:  # heavy modules are imported on use: the shell's other doors import this one too
    from .adapters import BlockLaw, Sampler
    from .audit import Verdict

ENGINES = ("ours", "transformers")
PROMPT = "The capital of France is"
FLOOR = 0.005  # outcomes below this are grouped, where there are more than MOST
MOST = 2_000

RULE_PAIRS = (("stochastic", 3, 1), ("stochastic", 4, 2), ("partial", 3, 5))
"""Kind, vocabulary and seed of the tabular models that a rule is put to; two letters would hide a wrong residual."""
RULE_GAMMA, RULE_LENGTH = 2, 3
TRIALS = 300  # calls of a rule that fails on draws that are no numbers yet
ROUNDING = 1e-9  # total variation that float sums may show


def audit(
    rule: Annotated[str | None, typer.Argument(help="path/to/module.py:function, a rule of your own.")] = None,
    target: Annotated[str, typer.Option(help="'packaged', a model folder, or a hub id.")] = "packaged",
    draft: Annotated[str | None, typer.Option(help="A packaged draft, a folder, a hub id, 'lookup' or 'none'.")] = None,
    engine: Annotated[str, typer.Option(help="Whose decoder: ours or transformers.")] = "ours",
    effect: Annotated[float, typer.Option(help="Total variation that must be seen.")] = 0.02,
    level: Annotated[float, typer.Option(help="Chance of a false alarm.")] = 0.001,
    power: Annotated[float, typer.Option(help="Chance of seeing the effect.")] = 0.99,
    budget: Annotated[int | None, typer.Option(help="Most samples; default: as many as are needed.")] = None,
    sequential: Annotated[bool, typer.Option("--sequential", help="Stop at the first deviation that shows.")] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="Context to test; may be repeated.")] = None,
    gamma: Annotated[int, typer.Option(help="Tokens drafted a round.")] = 3,
    length: Annotated[int, typer.Option(help="Tokens of a tested block.")] = 3,
    temperature: Annotated[float, typer.Option(help="Of target and draft.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the verdict to this file.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
) -> None:
    """Test whether outputs follow the target's law.  Exit status: 0 no deviation found, 1 deviation, 2 otherwise.

    A rule is `rule(p, q, draft, rng) -> tokens`: it gets the target's laws, the draft's, the drafted tokens and a numpy
    generator, and returns the tokens of the round.  It is run on small tabular models: every branch of it where its
    draws can be followed, else by sampling, where effect, level and power count.
    """
    from ..console import shell_console
    from ..decode import check_lengths
    from ..drafters import SamplingParams
    from ..files import json_text, write_text
    from ..validate import seed as checked_seed
    from ..validate import share, whole
    from .enumeration import Unenumerable

    for name, value in (("effect", effect), ("level", level), ("power", power)):
        share(name, value)
    checked_seed(seed)
    if budget is not None:
        whole("budget", budget, least=1)
    check_lengths(gamma, length)
    if length < 1:
        raise SpecdecError("length must be at least 1: the block that is tested needs a token")
    SamplingParams(temperature)
    if engine not in ENGINES:
        raise SpecdecError(f"unknown engine {engine!r}: use one of {', '.join(ENGINES)}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise SpecdecError(f"there is no folder {json_file.absolute().parent}: make it, or name another --json file")
    how: dict[str, Any] = {"effect": effect, "level": level, "power": power}
    how |= {"budget": budget, "sequential": sequential, "seed": seed}
    console = shell_console()
    try:
        if rule is not None:
            setting: dict[str, Any] = {"rule": rule}
            function = load_rule(rule)
            try:
                result = enumerated(function)
            except Unenumerable as reason:
                console.print(f"tested by sampling, since not every branch of the rule can be followed: {reason}")
                result = {**audit_rule(function, how).as_dict(), "not_enumerated": str(reason)}
        else:
            verdict, setting = audit_decoder(
                engine, target, draft, prompt or [PROMPT], gamma, length, temperature, how, console.print,
                trust_remote_code,
            )  # fmt: skip
            result = verdict.as_dict()
    except KeyboardInterrupt:
        shell_console(stderr=True).print(
            "interrupted: an audit cut short proves nothing; a smaller --budget ends sooner"
        )
        raise typer.Exit(130) from None
    console.print(result["sentence"], style="bold")
    if json_file is not None:
        write_text(json_file, json_text({**result, "setting": {**setting, **how}}))
    raise typer.Exit(result["exit_status"])


def watched(sampler: Callable[..., Any], expected_law: Any, contexts: list, how: dict[str, Any]) -> Verdict:
    """The audit with a progress bar on standard error."""
    from rich.progress import MofNCompleteColumn, Progress

    from ..console import shell_console
    from .audit import audit

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=shell_console(stderr=True), transient=True) as progress:
        task = progress.add_task("sampling", total=None)

        def tick(drawn: int, total: int) -> None:
            progress.update(task, completed=drawn, total=total)

        return audit(sampler, expected_law, contexts=contexts, on_samples=tick, **how)


# -- a decoder on models -------------------------------------------------------------------------------


def audit_decoder(
    engine: str,
    target: str,
    draft: str | None,
    prompts: list[str],
    gamma: int,
    length: int,
    temperature: float,
    how: dict[str, Any],
    say: Callable[[str], None],
    trust_remote_code: bool = False,
) -> tuple[Verdict, dict[str, Any]]:
    """Audit an engine on a pair, at each prompt; the verdict and what it was about."""
    from ..drafters import SamplingParams
    from ..generation_settings import listed, shaping
    from ..models.pair import end_tokens, vocabulary_size
    from .adapters import BlockLaw, tabular

    pair, make = load_engine(engine, target, draft, gamma, temperature, trust_remote_code)
    ends = end_tokens(pair)
    end = ends[0] if len(ends) == 1 else None  # the exact law knows one end token; with several, texts run on
    floor = 0.0 if vocabulary_size(pair.target) ** length <= MOST else FLOOR
    blocks: list[BlockLaw] = []
    samplers: list[Sampler] = []
    for text in prompts:
        ids = pair.encode(text)
        block = BlockLaw(tabular(pair.target, ids, SamplingParams(temperature), end), length, floor)
        blocks.append(block)
        samplers.append(block.of(make(ids, length, end)))
    rest = max(block.rest for block in blocks)
    say(f"{engine}: {pair.description}, blocks of {length} tokens, {sum(len(b.law) for b in blocks):,} outcomes")
    if off := shaping(pair):
        say(f"the target's {listed(off)} is switched off on both sides: what is tested is the model's own law")
    if rest:
        say(f"outcomes below {FLOOR} are grouped, up to {rest:.0%} of the law: changes within a group are not seen")
    places = list(range(len(prompts)))
    verdict = watched(lambda n, seed, i: samplers[i](n, seed), lambda i: blocks[i].law, places, how)
    setting = {
        "engine": engine, "target": target, "draft": draft, "prompts": prompts, "gamma": gamma, "length": length,
        "temperature": temperature, "end": end, "grouped": rest,
    }  # fmt: skip
    return verdict, setting


def load_engine(
    engine: str, target: str, draft: str | None, gamma: int, temperature: float, trust_remote_code: bool = False
) -> tuple[Any, Callable[..., Sampler]]:
    """The pair, and the function `(prompt ids, length, end) -> sampler`."""
    from ..drafters.on_disk import has_own_tokenizer, is_draft, read_manifest
    from ..load import LOOKUP, draft_source, fastest_model, load_pair, own_tokenizer
    from ..models.pair import PACKAGED, Pair, load_tokenizer, load_transformers
    from . import adapters
    from .memoize import memoized

    if engine == "ours":
        pair = load_pair(target, LOOKUP if draft == "none" else draft, trust_remote_code=trust_remote_code)
        if draft == "none":
            pair.draft = None
            pair.description = f"target {target}, no draft"
        quick = memoized(pair)
        return pair, lambda ids, length, end: adapters.ours(quick, ids, length, gamma, end, temperature=temperature)

    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # its own calls of generate give deprecation notices
    if draft is None:
        draft = (fastest_model(target) if str(target) == PACKAGED else None) or LOOKUP
    settings: dict[str, Any] = {"temperature": temperature} if temperature else {"do_sample": False}
    assistant = None
    if draft == LOOKUP:
        settings["prompt_lookup_num_tokens"] = gamma
    elif draft != "none":
        folder = draft_source(draft)
        if is_draft(folder) and read_manifest(folder)["kind"] != "model":
            raise SpecdecError(
                f"transformers takes a draft model or lookup, {draft} is neither: use --draft small, or --engine ours"
            )
        if not is_draft(folder) or has_own_tokenizer(folder):
            own_tokenizer(
                draft, folder, lambda: load_tokenizer(target, trust_remote_code=trust_remote_code), "same",
                trust_remote_code,
            )  # fmt: skip
        assistant = load_transformers(folder, trust_remote_code=trust_remote_code)
    model = load_transformers(target, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    pair = Pair(model, assistant, tokenizer, description=f"target {target}, draft {draft}")
    return pair, lambda ids, length, end: adapters.transformers(
        model, ids, length, assistant, gamma, end=end, **settings
    )


# -- a rule of one's own -------------------------------------------------------------------------------


def enumerated(rule: Callable[..., Any]) -> dict[str, Any]:
    """The exact verdict on a rule.

    Raises:
        Unenumerable: its draws cannot be followed.
        SpecdecError: the rule fails, on numbers as it would get them by sampling.
    """
    from ..exact import distance, random_pair, target_law
    from .enumeration import Unenumerable, rule_law

    def followed(p: Any, q: Any, x: list[int], rng: Any) -> Any:
        given = p.copy(), q.copy(), list(x)
        try:
            return rule(p, q, x, rng)
        except Unenumerable:
            raise
        except Exception as error:  # the rule's own, or what it gets for draws that are no numbers yet
            check_on_numbers(rule, *given)
            raise Unenumerable(f"it raises {type(error).__name__}: {first_line(error)}") from error

    variations = []
    for pair in RULE_PAIRS:
        target, draft = random_pair(*pair)
        try:
            law = rule_law(followed, target, draft, RULE_GAMMA, RULE_LENGTH)
        except ValueError as error:
            if isinstance(error, SpecdecError):
                raise
            raise Unenumerable("the rule does not do the same when its draws are the same") from error
        variations.append(float(distance(law, target_law(target, RULE_LENGTH))))
    largest = max(variations)
    found = largest > ROUNDING
    models = f"the exact output law on {len(variations)} small models, every branch enumerated"
    if found:
        sentence = f"deviation found: {models}, differs from the target's by a total variation of {largest:.3g}"
    else:
        sentence = f"no deviation: {models}, is the target's (to {ROUNDING:g})"
    return {
        "sentence": sentence,
        "exit_status": int(found),
        "outcome": "deviation found" if found else "no deviation found",
        "method": "enumeration",
        "variations": variations,
    }


def check_on_numbers(rule: Callable[..., Any], p: Any, q: Any, x: list[int]) -> None:
    """Call the rule with numpy's generators; an error that it raises there too is its own, and is told."""
    import numpy as np

    for seed in range(TRIALS):
        try:
            rule(p.copy(), q.copy(), list(x), np.random.default_rng(seed))
        except Exception as error:
            raise SpecdecError(f"the rule raised {type(error).__name__}: {first_line(error)} (drafted {x})") from error


def audit_rule(rule: Callable[..., Any], how: dict[str, Any]) -> Verdict:
    """Audit `rule(p, q, draft, rng) -> tokens` on several rounds of context-dependent tabular models."""
    from ..exact import random_pair, target_law
    from .adapters import of_rule

    pairs = [random_pair(*pair) for pair in RULE_PAIRS]
    samplers = [of_rule(rule, target, draft, RULE_GAMMA, RULE_LENGTH) for target, draft in pairs]
    laws = [target_law(target, RULE_LENGTH) for target, _ in pairs]
    return watched(lambda n, seed, i: samplers[i](n, seed), lambda i: laws[i], list(range(len(pairs))), how)


def load_rule(place: str) -> Callable[..., Any]:
    """The function at `path/to/module.py:function`; the file is loaded as a module, which may import its neighbours."""
    path, colon, name = place.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise SpecdecError(f"{place!r} names no rule: write path/to/module.py:function")
    if not Path(path).is_file():
        raise SpecdecError(f"there is no file {path}: give the path of a Python module")
    spec = importlib.util.spec_from_file_location("audited_rule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look their module up by its name
    if (beside := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SpecdecError(f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    rule = getattr(module, name, None)
    if not callable(rule):
        raise SpecdecError(f"{path} has no function {name}: name one of its functions after the colon")
    return rule
