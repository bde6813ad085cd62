"""Grammars by llguidance: JSON schemas, regular expressions, choices, Lark and EBNF."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import metadata
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError, RequestError, short
from mrv1.from_vllm import FORM, translated
from mrv1.integrations.json_schema import JsonSchema
from mrv1.options import Range, check_fields, instances

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHITESPACE = r" |\r?\n[ \t]{0,20}"
"""Between two tokens of JSON: nothing, one space, or a line break with an indentation.

Without a bound, a model that likes blanks writes them until ``max_tokens``.
"""

_ALL_TOKENS = '%llguidance {"no_forcing": true}'
"""Where only one text can follow, every way to cut it into tokens is allowed, not one alone."""

_ESCAPES = 'nrbtf"\\'
"""Escapes in JSON strings, without ``\\u``: by it, a declared property would have a second name
to which its schema does not apply."""

_MOST_PROBES = 300
"""Parts of a schema that are compiled alone, a millisecond each, to find the one that fails."""

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_EBNF_LINE = re.compile(r"\s*\n\s*+(?![\w-]+\s*::=)")
"""A break between lines of one rule."""
_EBNF_PART = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|#[^\n]*|\(', re.S)
"""Texts and sets of characters; a comment; or the start of a group."""
_EBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.S)
_EBNF_WORD = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^}]*\})|[\w-]+', re.S)
"""A text, a set of characters or a number of repetitions; or a rule's name."""
_LARK_PART = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|//[^\n]*)')

FORMS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of ``StructuredOutputsParams`` of which one is given."""


class LLGuidance:
    """Compiles grammars for one tokenizer; the latest compiled grammars are kept.

    Args:
        tokenizer: the model's tokenizer, of transformers.
        vocab_size: vocabulary size of the model, which may be larger than the tokenizer's.
        stop_token_ids: tokens that may end a complete output; None = the tokenizer's.

    ConfigError: no llguidance. RequestError: the tokenizer hides its bytes, or nothing ends an
    output.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        try:
            import llguidance
            from llguidance import gbnf_to_lark
        except ImportError as error:
            raise ConfigError(
                "LLGuidance: expected the package llguidance to be installed, "
                f"got {error}; pip install -e '.[structured]'"
            ) from error
        stops = stop_token_ids or [tokenizer.eos_token_id]
        if None in stops:
            raise RequestError("grammar: expected a tokenizer with an eos token, got none")
        self._stops = frozenset(stops)
        vocabulary = _Vocabulary(tokenizer, vocab_size, self._stops)
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=[*stops])
        self._new_matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._gbnf_to_lark = gbnf_to_lark.gbnf_to_lark
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def json_schema(
        self,
        schema: object,
        *,
        whitespace_pattern: str = WHITESPACE,
        additional_properties: bool = True,
    ) -> LLGuidanceGrammar:
        """Return the grammar of JSON texts that a schema allows.

        ``whitespace_pattern`` matches what may stand between two tokens of JSON;
        ``additional_properties``: objects may have unlisted ones by default. RequestError: a
        keyword is not enforced, or no value is valid.
        """
        version = metadata.version("llguidance")
        if [*map(int, version.split(".")[:2])] < [1, 8]:
            raise RequestError(
                "json: expected llguidance 1.8 or later, which bounds blanks and checks escaped "
                f"names, got {version}"
            )
        checked = JsonSchema(schema, closed=not additional_properties)
        options = {
            "whitespace_pattern": whitespace_pattern,
            "json_allowed_escapes": _ESCAPES,
            "coerce_one_of": True,  # JsonSchema has checked that alternatives exclude one another
        }

        def grammar(schema: dict[str, Any]) -> str:
            return f"start: %json {json_module.dumps(schema | {'x-guidance': options})}"

        try:
            return self._compiled("json", grammar(checked.root))
        except RequestError:
            for part, place, probe in islice(checked.probes(), _MOST_PROBES):
                try:
                    self._compile("json", grammar(probe))
                except RequestError as error:
                    raise RequestError(f"{error}, for {part} at {place!r}") from error
            raise

    def regex(self, pattern: str) -> LLGuidanceGrammar:
        """Return the grammar of whole matches of a pattern; RequestError: a wrong pattern."""
        (grammar,) = json_module.loads(self._new_matcher.grammar_from_regex(pattern))["grammars"]
        return self._compiled("regex", grammar["lark_grammar"])

    def choice(self, texts: Sequence[str]) -> LLGuidanceGrammar:
        """Return the grammar of some texts; RequestError if they cannot be compiled."""
        # One terminal: llguidance limits how many alternatives a rule may have.
        terminal = " | ".join(map(json_module.dumps, texts))
        return self._compiled("choice", f"start: TEXT\nTEXT: {terminal}")

    def grammar(self, rules: str) -> LLGuidanceGrammar:
        """Return that of EBNF from ``root`` or Lark from ``start``; RequestError: wrong rules."""
        if _EBNF_RULE.search(rules):
            try:
                rules = _by_character(self._gbnf_to_lark(_plain_ebnf(rules)))
            except Exception as error:  # the converter raises Exception itself
                raise RequestError(f"grammar: expected EBNF, got {error}") from error
        return self._compiled("grammar", rules)

    def _compile(self, name: str, lark: str) -> LLGuidanceGrammar:
        matcher = self._new_matcher(
            self._tokenizer, f"{lark}\n{_ALL_TOKENS}", log_level=0, limits=self._limits
        )
        if matcher.is_error():
            reason = " ".join(matcher.get_error().partition("<backtrace>")[0].split())
            reason = reason.rpartition("failed to compile JSON schema: ")[2]
            raise RequestError(f"{name}: expected text that llguidance compiles, got {reason}")
        return LLGuidanceGrammar(matcher, self._stops)


class LLGuidanceGrammar:
    """A compiled grammar, for any number of requests."""

    def __init__(self, matcher: Any, stops: frozenset[int]) -> None:  # noqa: ANN401 - LLMatcher
        self._matcher, self._stops = matcher, stops

    def matcher(self) -> LLGuidanceMatcher:
        """Return a matcher that follows a new output."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._stops)


class LLGuidanceMatcher:
    """Follows one output."""

    def __init__(self, matcher: Any, stops: frozenset[int]) -> None:  # noqa: ANN401 - LLMatcher
        self._matcher, self._stops, self._has_ended = matcher, stops, False

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set the bits of tokens that may come next, ``[ceil(vocab / 32)]``.

        RequestError: no token can continue the output, or the grammar is too ambiguous.
        """
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        self._raise_error()

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False = not allowed; RequestError: too ambiguous a grammar."""
        if token_id in self._stops:
            is_complete = not self._has_ended and self._matcher.is_accepting()
            self._has_ended |= is_complete
            return bool(is_complete)
        if self._has_ended:
            return False
        is_taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        self._raise_error()
        return is_taken

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            reason = "none" if reason == "NoExtensionBias" else reason
            raise RequestError(f"grammar: expected a token that may come next, got {reason}")

    def is_finished(self) -> bool:
        """Whether a stop token has ended the output."""
        return self._has_ended


class _Vocabulary:
    """The bytes of each token, as ``LLTokenizer`` reads them."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer: Any, size: int, stops: frozenset[int]) -> None:  # noqa: ANN401
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()
        kinds = {*re.findall(r'"type":"(\w+)"', state.decode())}
        if "ByteLevel" in kinds:
            to_bytes = _byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes = _sentencepiece
        else:
            raise RequestError(
                "grammar: expected a byte-level or sentencepiece tokenizer of the package "
                f"tokenizers, got {type(tokenizer).__name__} with the decoder {decoder!r}"
            )
        names = tokenizer.convert_ids_to_tokens([*range(min(size, len(tokenizer)))])
        self.tokens = [b"" if name is None else to_bytes(name) for name in names]
        self.tokens += [b""] * (size - len(names))
        special = {*stops}
        for token, added in tokenizer.added_tokens_decoder.items():
            if token < size:
                self.tokens[token] = added.content.encode()
                if added.special:
                    special.add(token)
        self.special_token_ids, self.eos_token_id = [*special], min(stops)

    def __call__(self, text: object) -> list[int]:
        """Encode a text, which ``_ALL_TOKENS`` leaves out."""
        raise NotImplementedError


def _byte_level(name: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
    return bytes.fromhex(byte[1]) if byte else name.replace("\u2581", " ").encode()


_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}
"""Character in the name of a byte-level token -> byte; GPT-2's table."""


def _plain_ebnf(rules: str) -> str:
    """Return rules without comments, one on a line, of which llguidance converts every part."""

    def plain(part: re.Match[str]) -> str:
        if part[1] is None:  # of ("a"?){2} the converter would lose the parentheses
            return '("" ' if part[0] == "(" else ""
        return _EBNF_ESCAPE.sub(_unescaped, part[1])

    names = {"root": "root"}

    def renamed(part: re.Match[str]) -> str:
        """Return a name of Lark's; the converter takes aB, a-b and a_b for one, and adds start."""
        word = part[0]
        if part[1] is None and word not in names:
            name = re.sub("(?<=[a-z])(?=[A-Z])", "_", word).replace("-", "_").lower()
            name = name if re.fullmatch("[a-z][a-z0-9_]*", name) else f"rule_{len(names)}"
            while name in {"start", *names.values()}:
                name += f"_{len(names)}"
            names[word] = name
        return names[word] if part[1] is None else word

    return _EBNF_WORD.sub(renamed, _EBNF_LINE.sub(" ", _EBNF_PART.sub(plain, rules)))


def _unescaped(escape: re.Match[str]) -> str:
    """Return a character in place of its escape, unless the character has a meaning itself."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None and (escape[0][1].isalnum() or escape[0][1] in '"\\[]'):
        return escape[0]
    character = chr(int(digits, 16)) if digits else escape[0][1]
    is_plain = character.isprintable() and character not in '"\\[]^-/'
    return character if is_plain or character > "\x9f" else f"\\x{ord(character):02x}"


def _by_character(lark: str) -> str:
    """Return rules that are parsed by character, as EBNF is.

    Lark first cuts a text into the longest terminals: in ``[a-z]* "ing"`` the letters would take
    the last three too. With terminals of one character, there is nothing to cut.
    """
    parts = _LARK_PART.split(lark)
    for index in range(1, len(parts), 2):
        if parts[index] == "/./":  # in Lark no line break
            parts[index] = "/(?s:.)/"
        elif len(parts[index]) > 2 and parts[index][0] == '"':
            characters = re.findall(
                r"\\x..|\\u[0-9a-fA-F]+|\\U[0-9a-fA-F]+|\\.|.", parts[index][1:-1], re.S
            )
            parts[index] = "(" + " ".join(f'"{each}"' for each in characters) + ")"
    parts[::2] = [part.lower() for part in parts[::2]]  # capitals name a terminal
    return "".join(parts)


def _is_choice(value: object) -> bool:
    return (
        isinstance(value, tuple) and value != () and all(isinstance(t, str) and t for t in value)
    )


_SCHEMAS = Range("a JSON schema as text or dict", lambda value: isinstance(value, str | Mapping))
_TEXT = instances(str, "text")
_CHOICES = Range("texts that are not empty", _is_choice)


class _NamesOfVLLM(type):
    """Refuses vLLM's fields that are not here with what to do instead, and unknown ones."""

    def __call__(cls, **given: Any) -> Any:  # noqa: ANN401 - of any field
        params = translated(given, FORM, "a field of StructuredOutputsParams", RequestError)
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(params.keys() - set(known)):
            raise RequestError(
                f"structured_outputs: expected one of {', '.join(known)}; got {short(unknown[0])}"
            )
        return super().__call__(**params)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(metaclass=_NamesOfVLLM):
    """The form of an output, by one of the first fields below; names and meaning are vLLM's.

    It is the value of ``SamplingParams.structured_outputs``, needs the package llguidance
    (``pip install -e '.[structured]'``), and is compiled once for a tokenizer.

    Raises:
        RequestError: not exactly one form is given, or a field has a value of another type.
    """

    json: Annotated[str | Mapping[str, Any] | None, _SCHEMAS] = field(default=None, hash=False)
    """A JSON schema, as text or as a dict, which is kept as text; ``docs/structured.md`` lists
    what is enforced."""
    regex: Annotated[str | None, _TEXT] = None
    """A regular expression that matches the output as a whole."""
    choice: Annotated[Sequence[str] | None, _CHOICES] = None
    """Texts, one of which is the output."""
    grammar: Annotated[str | None, _TEXT] = None
    """Rules in EBNF, which start at the rule ``root``, or in Lark, which start at ``start``."""
    json_object: Annotated[bool | None, Range("True", lambda value: value is True)] = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """Write JSON without whitespace; else one space or an indented line break may separate."""
    disable_additional_properties: bool = False
    """Where a JSON schema lists properties and says no more, objects have no others."""
    whitespace_pattern: Annotated[str | None, instances(str, "text or None")] = None
    """A regular expression of what may stand between two tokens of JSON."""

    def __post_init__(self) -> None:
        """Check the fields, and store the choices as a tuple."""
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs: expected exactly one of {', '.join(FORMS)}; got "
                f"{', '.join(given) or 'none'}"
            )
        if isinstance(self.choice, Sequence) and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))
        check_fields(self, RequestError, "structured_outputs.")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "structured_outputs.whitespace_pattern: expected None with "
                f"disable_any_whitespace, got {short(self.whitespace_pattern)}"
            )
        if isinstance(self.json, Mapping):
            try:
                text = json_module.dumps(self.json, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(
                    f"structured_outputs.json: expected a JSON schema, got {error}"
                ) from error
            object.__setattr__(self, "json", text)  # which no change of the dict reaches

    def compiled(
        self,
        tokenizer: Any,  # noqa: ANN401 - one of many classes of transformers
        vocab_size: int,
        stop_token_ids: list[int] | None,
    ) -> LLGuidanceGrammar:
        """Return the grammar for a model; see ``mrv1.sampler.GrammarSource``.

        Raises:
            RequestError: llguidance is not installed, or cannot compile the text.
        """
        try:
            key = (vocab_size, *(stop_token_ids or ()))
            compilers = _COMPILERS.setdefault(tokenizer, {})
            if key not in compilers:
                compilers[key] = LLGuidance(tokenizer, vocab_size, stop_token_ids=stop_token_ids)
            compiler = compilers[key]
            if self.regex is not None:
                return compiler.regex(self.regex)
            if self.choice is not None:
                return compiler.choice(self.choice)
            if self.grammar is not None:
                return compiler.grammar(self.grammar)
            pattern = WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern
            return compiler.json_schema(
                {"type": "object"} if self.json is None else self.json,
                whitespace_pattern="" if self.disable_any_whitespace else pattern,
                additional_properties=not self.disable_additional_properties,
            )
        except (ConfigError, RequestError, TypeError, ValueError) as error:
            raise RequestError(f"structured_outputs: {error}") from error


_COMPILERS: WeakKeyDictionary[Any, dict[tuple[int, ...], LLGuidance]] = WeakKeyDictionary()
"""Tokenizer -> vocabulary size and stop tokens -> their compiler."""
