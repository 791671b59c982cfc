"""JSON Schema of policy files as people write them, for editors (`kvir schema`).

Made from the same shapes as the decoder.  A text that decodes satisfies the schema; what a schema cannot say
(duplicate keys, printable text, how a number is spelt) is left to `kvir check`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, assert_never

import msgspec
from msgspec import Struct

from kvir.policy_ir import scalars
from kvir.policy_ir.nodes import Policy
from kvir.policy_ir.reference import field_comments
from kvir.policy_ir.shape import (
    Choice,
    Field,
    Flag,
    Form,
    Many,
    OneOf,
    Range,
    Real,
    Record,
    Shape,
    Text,
    Whole,
    WordOr,
    form,
)
from kvir.policy_ir.source import Broken, Mapping, Scalar, Sequence, Tree

DIALECT = "https://json-schema.org/draft/2020-12/schema"

JsonSchema = dict[str, Any]


def policy_schema() -> JsonSchema:
    """The schema of a whole file, with one definition per node."""
    maker = _Maker()
    root = maker.shape(Record(Policy))
    return {
        "$schema": DIALECT,
        "title": "kvir policy",
        **root,
        "$defs": dict(sorted(maker.definitions.items())),
    }


def schema_text() -> str:
    """The schema as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(policy_schema()), indent=2).decode() + "\n"


def plain_value(node: Tree) -> Any:
    """A tree as the plain value that a schema validates: what a YAML 1.2 reader would load."""
    match node:
        case Scalar():
            return _plain_scalar(node)
        case Sequence():
            return [plain_value(item) for item in node.items]
        case Mapping():
            return {str(plain_value(key)): plain_value(value) for key, value in node.entries}
        case Broken():
            return None
        case _:
            assert_never(node)


class _Maker:
    def __init__(self) -> None:
        self.definitions: dict[str, JsonSchema] = {}

    def shape(self, shape: Shape) -> JsonSchema:
        match shape:
            case Whole(low=low, high=high):
                return _present(type="integer", minimum=low, maximum=high)
            case Real(low=low, high=high, above=above, below=below):
                return _present(
                    type="number",
                    minimum=low,
                    maximum=high,
                    exclusiveMinimum=above,
                    exclusiveMaximum=below,
                )
            case Text(min_length=low, max_length=high):
                return _present(
                    type="string", minLength=low or None, maxLength=high or scalars.MAX_TEXT_LENGTH
                )
            case Flag():
                return {"type": "boolean"}
            case Choice(words=words):
                return {"enum": list(words)}
            case Range(high=high):
                number = "(0|[1-9][0-9]{0,17})"
                text = {"type": "string", "pattern": f"^{number}(\\.\\.{number})?$"}
                return {"anyOf": [{"type": "integer", "minimum": 0, "maximum": high}, text]}
            case WordOr(word=word, item=item):
                return {"anyOf": [{"const": word}, self.shape(item)]}
            case Many(item=item, lone=lone, min_length=low, max_length=high):
                one = self.shape(item)
                many = _present(type="array", items=one, minItems=low or None, maxItems=high)
                return {"anyOf": [one, many]} if lone else many
            case Record(cls=cls):
                return self._reference(cls)
            case OneOf(by_tag=by_tag, title=title):
                name = title if len(by_tag) > 1 else f"only_{next(iter(by_tag))}"
                return self._defined(name, lambda: {"title": title, **self._union(by_tag)})
            case _:
                assert_never(shape)

    def _union(self, by_tag: dict[str, type[Struct]]) -> JsonSchema:
        forms = {tag: form(cls) for tag, cls in by_tag.items()}
        bare = [tag for tag, struct in forms.items() if struct.may_be_bare]
        tagged: JsonSchema = {
            "type": "object",
            "properties": {tag: self._payload(struct) for tag, struct in forms.items()},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        }
        return {"anyOf": [{"enum": bare}, tagged]} if bare else tagged

    def _payload(self, struct: Form) -> JsonSchema:
        """What may follow a tag."""
        fields = self._reference(struct.cls)
        short = struct.short_field
        if short is None:
            return fields
        return {"anyOf": [{**self.shape(short.shape), "not": {"type": "object"}}, fields]}

    def _reference(self, cls: type[Struct]) -> JsonSchema:
        return self._defined(cls.__name__, lambda: self._definition(form(cls)))

    def _defined(self, name: str, make: Callable[[], JsonSchema]) -> JsonSchema:
        if name not in self.definitions:
            self.definitions[name] = {}  # a recursive type refers to itself
            self.definitions[name] = make()
        return {"$ref": f"#/$defs/{name}"}

    def _definition(self, struct: Form) -> JsonSchema:
        properties: JsonSchema = {}
        required: list[str] = []
        choices: list[JsonSchema] = []
        for field in struct.fields.values():
            if field.inline and isinstance(field.shape, OneOf):
                tags = field.shape.by_tag
                properties |= {tag: self._payload(form(cls)) for tag, cls in tags.items()}
                choices.append({"oneOf": [{"required": [tag]} for tag in tags]})
                continue
            properties[field.name] = self._property(field, field_comments(struct.cls).get(field.name))
            if field.required and not (struct.sugar is not None and field.name == "keep"):
                required.append(field.name)
        if struct.sugar is not None:
            properties[struct.sugar.name] = self.shape(struct.sugar.shape)
            choices.append({"oneOf": [{"required": ["keep"]}, {"required": [struct.sugar.name]}]})
        return _present(
            title=struct.tag or struct.cls.__name__.lower(),
            description=inspect.getdoc(struct.cls),
            type="object",
            properties=properties,
            required=required or None,
            allOf=choices or None,
            additionalProperties=False,
        )

    def _property(self, field: Field, comment: str | None) -> JsonSchema:
        simple = isinstance(field.default, str | bool | int | float) and not field.required
        return {"title": field.name, **self.shape(field.shape), **_present(description=comment)} | (
            {"default": field.default} if simple else {}
        )


def _present(**keywords: Any) -> JsonSchema:
    return {name: value for name, value in keywords.items() if value is not None}


def _plain_scalar(node: Scalar) -> Any:
    if not node.plain:
        return node.text
    if scalars.is_nothing(node):
        return None
    if node.text in ("true", "false"):
        return node.text == "true"
    if scalars.is_text(node.text):
        return node.text
    number = float(node.text)
    return int(node.text) if number.is_integer() and node.text.lstrip("+-").isdigit() else number
