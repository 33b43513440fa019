"""What a prompt may be: a text, chat messages or token ids, in the shapes in which people have them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .errors import SpecdecError, first_line
from .validate import shown, unwrapped

if TYPE_CHECKING:
    from .models.pair import Pair

WANTED = "give a text, chat messages, token ids, or a list of them"
Message = dict[str, Any]


def as_list(prompts: Any) -> list:
    """A list of prompts from one prompt or several; raises `SpecdecError` for none.

    Args:
        prompts: a text; chat messages; ids as a list, `[n]` array or tensor; or several: a list, `[batch, n]`.

    >>> import numpy
    >>> as_list("Hi"), as_list(numpy.array([5, 9])), as_list(numpy.array([[5, 9], [4, 4]]))
    (['Hi'], [[5, 9]], [[5, 9], [4, 4]])
    """
    if is_array(prompts):
        if prompts.ndim > 2:
            raise SpecdecError(f"prompts have {prompts.ndim} dimensions: give ids as [n], or [batch, n] for several")
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        raise SpecdecError('a tokenizer\'s whole output is no prompt: give its ["input_ids"]')
    if isinstance(prompts, (list, tuple)) and prompts:
        one = isinstance(prompts[0], Mapping) or is_id(prompts[0])
        return [list(prompts)] if one else list(prompts)
    got = "an empty one" if isinstance(prompts, (list, tuple)) else shown(prompts)
    raise SpecdecError(f"no prompt, got {got}: {WANTED}")


def encode_all(pair: Pair, prompts: Any) -> list[list[int]]:
    """The ids of each prompt; of several, an error says which it is about."""
    several = as_list(prompts)
    ids = []
    for number, prompt in enumerate(several, 1):
        try:
            ids.append(pair.encode(prompt))
        except SpecdecError as error:
            raise SpecdecError(
                f"prompt {number} of {len(several)}: {error}" if len(several) > 1 else str(error)
            ) from None
    return ids


def token_ids(prompt: Any) -> list[int] | None:
    """The ids as ints where the prompt is ids, None where it is something else; raises where only some are.

    >>> import numpy
    >>> token_ids(list(numpy.array([5, 9]))), token_ids("Hi")
    ([5, 9], None)
    """
    if is_array(prompt):
        prompt = prompt.tolist()
    if not isinstance(prompt, (list, tuple)) or not prompt or not any(is_id(i) for i in prompt):
        return None
    if bad := [i for i in prompt if not is_id(i)]:
        raise SpecdecError(f"a prompt of token ids has {shown(bad[0])} among them: give whole numbers only")
    return [int(unwrapped(i)) for i in prompt]


def is_array(value: Any) -> bool:
    """Whether it is numpy's array or torch's tensor of one dimension or more; a 0-d one is a number."""
    return not isinstance(value, type) and bool(getattr(value, "shape", ())) and hasattr(value, "tolist")


def is_id(value: Any) -> bool:
    plain = unwrapped(value)
    return isinstance(plain, Integral) and not isinstance(plain, bool)


def as_messages(prompt: Any) -> list[Message] | None:
    """Chat messages with their contents as texts; None for what is no chat.

    Text parts of a content are joined, other parts are refused, and so is a message without a role.

    >>> as_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]}])
    [{'role': 'user', 'content': 'Hi!'}]
    """
    if not isinstance(prompt, (list, tuple)) or not prompt or not isinstance(prompt[0], Mapping):
        return None
    messages = []
    for number, message in enumerate(prompt, 1):
        where = f"chat message {number}"
        if not isinstance(message, Mapping):
            raise SpecdecError(f'{where} is {shown(message)}: write {{"role": "user", "content": "..."}}')
        if not isinstance(message.get("role"), str):
            raise SpecdecError(f'{where} has no role: write {{"role": "user", "content": "..."}}')
        messages.append({**message, "content": content_text(where, message.get("content"))})
    return messages


def content_text(where: str, content: Any) -> str:
    """The text of a message's content: a string, text parts, or None, which says nothing."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise SpecdecError(f"{where} has a part of type {kind!r}: only text parts can be decoded, leave it out")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise SpecdecError(f"{where} has {shown(content)} as its content: give a text")
    return check_text(where, content or "")


def check_text(where: str, text: str) -> str:
    """Refuse a text that no tokenizer can read: half of a character that UTF-16 writes as two.

    >>> check_text("the prompt", "hi \\ud83d")
    Traceback (most recent call last):
    specdec_lib.errors.SpecdecError: the prompt has half a character (U+D83D at position 3): cut between characters
    """
    half = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    if half is not None:
        raise SpecdecError(
            f"{where} has half a character (U+{ord(text[half]):04X} at position {half}): cut between characters"
        )
    return text


def text_ids(tokenizer: Any, prompt: str | list[Message]) -> list[int]:
    """Ids of a text or of chat messages, by the chat template where there is one."""
    texts = [check_text("the prompt", prompt)] if isinstance(prompt, str) else [m["content"] for m in prompt]
    if not texts[-1].strip():
        raise SpecdecError("empty prompt: write at least one word")
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template's own, or what jinja makes of it
            roles = ", ".join(m["role"] for m in messages)
            raise SpecdecError(
                f"the chat template cannot write these messages ({first_line(error)}): change their roles ({roles}), "
                "or give token ids"
            ) from error
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(texts) > 1:
        raise SpecdecError("chat messages need a tokenizer with a chat template: give a plain text instead")
    return tokenizer(texts[0])["input_ids"]
