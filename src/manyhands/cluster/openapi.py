"""The OpenAPI 3.1 document, made from the routes and the msgspec types: it cannot say otherwise."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from manyhands._version import __version__
from manyhands.cluster.desk import Failed
from manyhands.cluster.routes import ROUTES, Body, Kind, Role, Route

_REF = "#/components/schemas/{name}"
_EVERYWHERE = (400, 401, 403, 404, 405, 413, 415, 421, 429, 431, 500, 503)
"""What the door, or a coordinator in need, can answer to any request."""

Document = dict[str, Any]  # JSON


def document() -> Document:
    """The whole document. It has no secret in it."""
    kinds = _kinds()
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    paths: dict[str, Document] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "manyhands coordinator",
            "version": __version__,
            "description": "Jobs, hosts and logs of a cluster. Every request, the one for this "
            "document too, carries `Authorization: Bearer TOKEN`.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                role.value: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": f"the {role.value} token of the cluster",
                }
                for role in Role
            },
        },
    }


def _kinds() -> list[Any]:
    found: list[Any] = [Failed]
    for route in ROUTES:
        found += [kind for kind in (route.body, *route.answers.values()) if _is_json(kind)]
    return found


def _is_json(kind: Kind) -> bool:
    return not isinstance(kind, Body)


def _schema(kind: Kind) -> Document:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _operation(route: Route) -> Document:
    operation: Document = {
        "operationId": route.does,
        "summary": route.summary,
        "security": [{role.value: []} for role in Role if route.role in (role, None)],
        "parameters": [*_parameters(route.parts, "path"), *_parameters(route.query, "query")],
        "responses": _responses(route),
    }
    if isinstance(route.body, Body):
        if route.body is Body.BYTES:
            operation["requestBody"] = {"required": True, "content": {Body.BYTES.value: {}}}
    else:
        content = {"application/json": {"schema": _schema(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(kind: type[msgspec.Struct], where: str) -> list[Document]:
    schema = msgspec.json.schema(kind)
    # A struct may be referred to by name even where it is the root.
    own = schema["$defs"][kind.__name__] if "$defs" in schema else schema
    return [
        {
            "name": name,
            "in": where,
            "required": where == "path" or name in own["required"],
            "schema": _inlined(of, schema.get("$defs", {})),
        }
        for name, of in own["properties"].items()
    ]


def _inlined(schema: Document, definitions: Document) -> Document:
    """A parameter is absent, not null; and its enumeration stands where it is used."""
    if "anyOf" in schema:
        (schema,) = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
    if "$ref" in schema:
        schema = definitions[re.sub(r".*/", "", schema["$ref"])]
    return {key: value for key, value in schema.items() if key not in ("default", "title")}


def _responses(route: Route) -> Document:
    responses: Document = {}
    for status, kind in route.answers.items():
        answer: Document = {"description": route.summary}
        if kind is Body.BYTES:
            answer["content"] = {Body.BYTES.value: {}}
        elif kind is Body.DOCUMENT:
            answer["content"] = {Body.DOCUMENT.value: {"schema": {"type": "object"}}}
        elif kind is not Body.NONE:
            answer["content"] = {"application/json": {"schema": _schema(kind)}}
        if route.headers:
            answer["headers"] = {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in route.headers.items()
            }
        responses[str(status)] = answer
    failed = {"application/json": {"schema": _schema(Failed)}}
    for status in sorted({*_EVERYWHERE, *route.errors}):
        responses[str(status)] = {"description": "An error, with a hint", "content": failed}
    return responses
