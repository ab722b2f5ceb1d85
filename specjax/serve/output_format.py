"""Fields that request structured output, and the grammar that they describe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specjax.engine.grammar import MAX_SOURCE, Grammar, GrammarError
from specjax.serve.errors import bad_request
from specjax.serve.fields import Body, Flag, Text, Values, at_most

MAX_CHOICES = 1024
INVALID = "invalid_grammar"  # code of errors in grammars, which the schemas of bodies cannot detect

Source = Annotated[Text, Field(min_length=1, max_length=MAX_SOURCE)]


def _is_schema(value: Any) -> Any:
    if value is None or (isinstance(value, dict | str) and value != ""):
        return value
    raise PydanticCustomError("json_schema", "must be a JSON schema, as an object or a text")


# `Grammar.json` checks the schema itself.
JsonSchema = Annotated[Any, BeforeValidator(_is_schema, json_schema_input_type=dict[str, Any] | str | None)]
Choices = Annotated[list[Source], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), at_most(MAX_CHOICES)]


with warnings.catch_warnings():
    # pydantic's base class has deprecated methods of these names.
    warnings.filterwarnings("ignore", message='Field name "(json|schema)"')

    class JsonSchemaFormat(Body):
        name: Text | None = None
        description: Text | None = None
        schema: JsonSchema = Field(None, description="Default: any object.")  # type: ignore[assignment]
        strict: Flag | None = Field(None, description="Schemas are always followed.")

    class StructuredOutputs(Body):
        """vLLM's field: exactly one member."""

        unsupported: ClassVar[Mapping[str, Values]] = {
            "structural_tag": (), "whitespace_pattern": (), "disable_any_whitespace": (True,),
            "disable_additional_properties": (False,), "disable_fallback": (True,),
        }  # fmt: skip

        json: JsonSchema = None  # type: ignore[assignment]
        regex: Source | None = None
        choice: Choices | None = None
        grammar: Source | None = Field(None, description="As `ebnf`.")
        json_object: Flag | None = None

        def chosen(self) -> Grammar | None:
            return chosen(self, OUTPUTS, "structured_outputs.")[1]


# For bodies of SGLang.
UNSUPPORTED_FORMATS: dict[str, Values] = {
    "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (),
}  # fmt: skip


def grammar_of_type(name: str, schema: Any) -> Grammar | None:
    """The grammar of a format's `type`. Without a schema it is any JSON object."""
    if name == "text":
        return None
    return Grammar("json_schema") if name == "json_object" or schema is None else Grammar.json(schema)


class ResponseFormat(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"schema": ()}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="Needs the type `json_schema`.")

    def chosen(self) -> Grammar | None:
        if self.type == "json_schema" and self.json_schema is None:
            raise bad_request("response_format.json_schema is required", "response_format")
        return grammar_of_type(self.type, None if self.json_schema is None else self.json_schema.schema)


Convert = Callable[[Any], Grammar | None]
OUTPUTS: dict[str, Convert] = {
    "json": Grammar.json,
    "regex": lambda text: Grammar("regex", text),
    "choice": Grammar.choice,
    "grammar": lambda text: Grammar("ebnf", text),
    "json_object": lambda wanted: Grammar("json_schema") if wanted else None,
}
"""Maps fields to their grammar."""

FIELDS: dict[str, Convert] = {
    "response_format": ResponseFormat.chosen,
    "json_schema": Grammar.json,
    "regex": OUTPUTS["regex"],
    "ebnf": OUTPUTS["grammar"],
    "guided_json": Grammar.json,
    "guided_regex": OUTPUTS["regex"],
    "guided_choice": OUTPUTS["choice"],
    "guided_grammar": OUTPUTS["grammar"],
    "structured_outputs": StructuredOutputs.chosen,
}


def chosen(body: Body, fields: Mapping[str, Convert] = FIELDS, place: str = "") -> tuple[str | None, Grammar | None]:
    """The field that requests structured output, and its grammar. Raises an ApiError, a 400, if a field is wrong, or
    there are several."""
    grammars, root = dict[str, Grammar](), place.partition(".")[0]
    for name, convert in fields.items():
        if (value := getattr(body, name, None)) is None or name not in type(body).model_fields:
            continue
        try:
            grammar = convert(value)
        except GrammarError as error:
            raise bad_request(f"{place}{name} {error}", root or name, INVALID) from error
        if grammar is not None:
            grammars[name] = grammar
    if len(grammars) > 1:
        several = ", ".join(place + name for name in grammars)
        raise bad_request(f"{several} ask for different forms of output: give one", root or next(iter(grammars)))
    return next(iter(grammars.items()), (None, None))
